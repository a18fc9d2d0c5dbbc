"""How far a result is from what it should be, element by element: a norm over a whole tensor does not
see one wrong element."""


def furthest(got, want):
    """The largest error of an element of `got` in units of its own size in `want` and the root mean
    square of `want` together, and where it is: (0.0, None) of no element or of equal ones. Elements
    that are NaN in one of them alone are infinitely far."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    if tuple(got.shape) != tuple(want.shape):
        raise AssertionError(f"shape {tuple(got.shape)}, want {tuple(want.shape)}")
    error = (got - want).abs()
    error[got == want] = 0.0  # infinities too
    error[got.isnan() & want.isnan()] = 0.0
    if error.numel() == 0 or not bool((error != 0).any()):
        return 0.0, None
    finite = want[want.isfinite()]
    typical = finite.square().mean().sqrt() if finite.numel() else want.new_zeros(())
    # Some are 0 altogether: gradients of the router where one expert has all the weight.
    far = error / (want.abs() + typical + 1e-9)
    far[far.isnan()] = float("inf")
    place = int(far.argmax())
    index, rest = [], place
    for size in reversed(want.shape):
        index.insert(0, rest % size)
        rest //= size
    return float(far.flatten()[place]), tuple(index)
