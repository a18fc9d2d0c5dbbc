"""A layer over the ranks that a launcher starts: as one call, and by steps with experts of one's own.

    torchrun --nproc_per_node 8 examples/python/layer_over_ranks.py  # on GPUs where there are any
    mpirun -np 8 python3 examples/python/layer_over_ranks.py         # srun -n 8 likewise
    python3 examples/python/layer_over_ranks.py                      # one rank
"""

import torch
import torch.nn.functional as F

import switchyard as sw

E, K, H, I, T = 64, 4, 512, 256, 32

comm = sw.Communicator.from_env()
rank, world = comm.rank, comm.size
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)

# Any weights will do here, the same on every rank, which keeps its experts' ones. Of a checkpoint
# sw.Layer.from_checkpoint(path, layer=0, device=..., comm=comm) reads only those.
random = torch.Generator().manual_seed(17)
gate = torch.randn(E, H, generator=random) / H**0.5
w13 = torch.randn(E, 2 * I, H, generator=random) / H**0.5
w2 = torch.randn(E, H, I, generator=random) / I**0.5
x = torch.randn(T, H, generator=torch.Generator().manual_seed(rank)).to(device)

layer = sw.Layer(gate, w13, w2, top_k=K, comm=comm, device=str(device), max_tokens=T)
y = layer(x)

expert, weight = sw.route(x @ gate.to(device).T, K)
ep = sw.ExpertParallel(comm, num_experts=E, top_k=K, hidden=H, max_tokens=T, dtype="f32",
                       device=str(device))
d = ep.dispatch(x, expert, weight)  # each token once to each rank that has one of its experts
begin = d.expert_begin.tolist()
rows = torch.zeros(max(1, begin[-1]), H, device=device)
for local in range(len(begin) - 1):
    e, own = rank * E // world + local, slice(begin[local], begin[local + 1])
    gates, up = (d.x[d.row_x[own].long()] @ w13[e].to(device).T).chunk(2, dim=1)
    rows[own] = (F.silu(gates) * up) @ w2[e].to(device).T
by_hand = ep.combine(rows, d)  # the weighted sums, back home

print(f"rank {rank} of {world} on {device}: {T} tokens, "
      f"{begin[-1]} rows for its experts, largest difference {(y - by_hand).abs().max():.1e}")
