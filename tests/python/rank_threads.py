"""Threads of a test, and ranks as such."""

import threading

import switchyard as sw


def together(body, count):
    """body(number) on each of as many threads; what each returns, in order. The first error is raised."""
    out, errors = [None] * count, []

    def run(number):
        try:
            out[number] = body(number)
        except BaseException as error:  # the main thread reports it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return out


def on_threads(body, num_ranks):
    """body(rank, communicator) on each rank; what each returns, in order."""
    comms = sw.Communicator.threads(num_ranks)
    return together(lambda rank: body(rank, comms[rank]), num_ranks)
