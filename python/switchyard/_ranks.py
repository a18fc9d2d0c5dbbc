"""Ranks, and how a process becomes one."""

import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_void_p

from ._errors import NotCopied, SwitchyardError, integer, invalid
from ._native import Handle, native
from ._structs import UniqueId


def communicator_of(value):
    """`value`, which is a Communicator or None."""
    if value is not None and not isinstance(value, Communicator):
        raise invalid(f"comm={value!r} is no Communicator")
    return value


class Communicator(NotCopied):
    """The ranks that run one layer together; one object per rank.

    Communicator(rank, world, unique_id) is one of `world` processes of this host; the id is what
    Communicator.unique_id() has given one of them, or all by a file. Calls on a communicator and on all that is made
    with it run one after the other, in the order in which they were made; those of several threads
    take turns.
    """

    def __init__(self, rank, world, unique_id):
        identity = UniqueId()
        if not isinstance(unique_id, bytes):
            raise invalid(f"unique_id={unique_id!r} is none that Communicator.unique_id() has given")
        identity.bytes = unique_id[:63]
        handle = Handle("communicator_free")
        native.communicator_create(integer("rank", rank), integer("world", world), byref(identity),
                                   handle.out())
        self._adopt(handle)

    def _adopt(self, handle):
        self._handle = handle
        self._begin_in_this_process()

    def _begin_in_this_process(self):
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._worker = None  # runs what was called with async_=True
        self._last = None  # what it was told last

    @classmethod
    def _of(cls, handle):
        self = cls.__new__(cls)
        self._adopt(handle)
        return self

    @staticmethod
    def unique_id(path=None, rank=0):
        """Bytes that name one meeting of processes. With `path` the same for all ranks that name
        the file: rank 0 makes them and writes it, the others wait for it, up to 60 s."""
        identity = UniqueId()
        if path is None:
            native.unique_id_make(byref(identity))
        else:
            native.unique_id_by_file(os.fsencode(path), rank, byref(identity))
        return bytes(identity.bytes)

    @classmethod
    def from_env(cls):
        """Rank and world as mpirun, srun or torchrun set them, or RANK, WORLD_SIZE, MASTER_ADDR
        and MASTER_PORT by hand on one host; a world of 1 without a launcher."""
        handle = Handle("communicator_free")
        native.communicator_from_environment(handle.out())
        return cls._of(handle)

    @classmethod
    def from_torch(cls, group=None):
        """The ranks of a torch.distributed process group, all on one host; alone where there is
        no group. Collective over the group, which may be destroyed afterwards."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() \
                or not distributed.is_initialized():
            return cls.threads(1)[0]
        world = distributed.get_world_size(group)
        told = [None] * world
        distributed.all_gather_object(told, (socket.gethostname(), cls.unique_id()), group=group)
        hosts = sorted({host for host, _ in told})
        if len(hosts) > 1:
            raise SwitchyardError("unsupported",
                                  f"the group's processes are on {', '.join(hosts)}; "
                                  "want one host, or mpirun and Communicator.from_env()")
        return cls(distributed.get_rank(group), world, told[0][1])

    @classmethod
    def threads(cls, num_ranks):
        """Ranks as threads of this process: one communicator for each."""
        num_ranks = integer("num_ranks", num_ranks)
        pointers = (c_void_p * max(num_ranks, 0))()
        native.communicator_threads(num_ranks, pointers)
        ranks = []
        for value in pointers:
            handle = Handle("communicator_free")
            handle.pointer = c_void_p(value)
            ranks.append(cls._of(handle))
        return ranks

    @property
    def handle(self):
        return self._handle

    @property
    def pointer(self):
        return self._handle.pointer

    @property
    def rank(self):
        return native.communicator_rank(self.pointer)

    @property
    def size(self):
        return native.communicator_size(self.pointer)

    def set_timeout(self, seconds):
        """How long any wait on another rank may take."""
        if not isinstance(seconds, (int, float)):
            raise invalid(f"timeout_s={seconds!r} is no number of seconds")
        self.run(lambda: native.communicator_set_timeout(self.pointer, int(seconds * 1000)))

    def recover(self):
        """Collective, after a timeout: afterwards the same objects work again."""
        self.run(lambda: native.communicator_recover(self.pointer))

    def run(self, call):
        """Calls behind everything that is still under way."""
        with self._turn():
            if self._last is not None:
                self._last.exception()  # waits; the error is its own caller's
                self._last = None
            return call()

    def start(self, call):
        """Calls behind everything that is still under way, in another thread."""
        with self._turn():
            if self._worker is None:
                self._worker = ThreadPoolExecutor(max_workers=1)
            self._last = self._worker.submit(call)
            return Pending(self._last)

    def _turn(self):
        if self._process != os.getpid():  # a child of fork() has none of the threads
            self._begin_in_this_process()
        return self._lock


class Pending:
    """A call under way."""

    def __init__(self, future):
        self._future = future

    def wait(self):
        """What the call gives; its error is raised here."""
        return self._future.result()
