"""Ranks as threads of a test."""

import threading

import switchyard as sw


def on_threads(body, num_ranks):
    """body(rank, communicator) on each rank; what each returns, in order."""
    comms = sw.Communicator.threads(num_ranks)
    out, errors = [None] * num_ranks, []

    def run(rank):
        try:
            out[rank] = body(rank, comms[rank])
        except BaseException as error:  # the main thread reports it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return out
