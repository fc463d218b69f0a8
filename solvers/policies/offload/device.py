"""Steps in the making, for methods that decide as they go: what is in memory, and how far each stream has come."""

from graphs.schedule import Compute, Free, Schedule, Step
from solvers.policies.offload.moves import Offer


class Device:
    """The device and its two channels while steps are issued, with memory and clocks as the judge will have them.

    A tensor that is sent stays in memory while it is copied out: it *leaves*. It is freed once its copy is done, or when
    room is wanted, which the computation then waits for; if it is read before, it has not left.

    Copies on the host stay: what has one already is sent in no time. They are freed where the host has no more room, those
    of tensors that are on the device first.

    Attributes:
        now_s: when the computation has done what was issued so far.
        live: produced tensors in memory, those that leave included.
        leaving: by tensor when its copy out is done.
        host: tensors that have a copy there, or will have.
        memory_bytes: taken on the device, static bytes included.
    """

    def __init__(self, offer: Offer, budget_bytes: int) -> None:
        self.offer, self.budget_bytes = offer, budget_bytes
        self.steps: list[Step] = []
        self.now_s = self.out_s = self.in_s = 0.0
        self.live: set[int] = set()
        self.leaving: dict[int, float] = {}
        self.host: dict[int, float] = {}  # when the copy is there
        self.read_s: dict[int, float] = {}  # when the last copy-in of it ends
        self.ready_s: dict[int, float] = {}
        self.host_bytes = 0
        self.memory_bytes = offer.program.static_bytes

    @property
    def schedule(self) -> Schedule:
        """All steps so far."""
        return Schedule(tuple(self.steps))

    def has(self, t: int) -> bool:
        """Whether tensor `t` is in memory to stay."""
        return t in self.live and t not in self.leaving

    def recall(self, t: int) -> None:
        """Tensor `t`, if it leaves, stays after all."""
        self.leaving.pop(t, None)

    def fits(self, size_bytes: int) -> bool:
        """Whether there is room for so much now, without waiting."""
        for t in [t for t, done_s in self.leaving.items() if done_s <= self.now_s]:
            self._gone(t)
        return self.memory_bytes + size_bytes <= self.budget_bytes

    def make_room(self, size_bytes: int) -> bool:
        """Wait for what leaves, the first first, until there is room for so much; False if that is not enough."""
        while not self.fits(size_bytes) and self.leaving:
            self._gone(min(self.leaving, key=lambda t: self.leaving[t]))
        return self.fits(size_bytes)

    def _gone(self, t: int) -> None:
        self.now_s = max(self.now_s, self.leaving.pop(t))
        self.free(t)

    def free(self, t: int) -> None:
        """Tensor `t` goes at once; its copy out, if there is one, is waited for."""
        self.now_s = max(self.now_s, self.host.get(t, 0.0), self.ready_s.get(t, 0.0))
        self.leaving.pop(t, None)
        self.live.remove(t)
        self.memory_bytes -= self.offer.size_bytes(t)
        self.steps.append(Free(t))

    def compute(self, op_id: int) -> None:
        """Execute an op of the program."""
        op = self.offer.program.ops[op_id]
        self.now_s = max((self.now_s, *(self.ready_s.get(t, 0.0) for t in op.inputs))) + op.time_s
        self.steps.append(Compute(op_id))
        for t in op.outputs:
            if t not in self.live:
                self.live.add(t)
                self.ready_s[t] = self.now_s
                self.memory_bytes += self.offer.size_bytes(t)

    def can_send(self, t: int) -> bool:
        """Whether tensor `t` may go to the host, and there is or can be room for it."""
        if t not in self.offer.trips:
            return False
        limit = self.offer.host_bytes
        idle_bytes = sum(self.offer.size_bytes(u) for u in self.host if self.has(u))
        return t in self.host or limit is None or self.host_bytes - idle_bytes + self.offer.size_bytes(t) <= limit

    def send(self, t: int) -> None:
        """Tensor `t`, for which there is or can be room on the host, leaves."""
        if t not in self.host:
            limit = self.offer.host_bytes
            for other in [u for u in self.host if self.has(u)]:
                if limit is None or self.host_bytes + self.offer.size_bytes(t) <= limit:
                    break
                self.out_s = max(self.out_s, self.host.pop(other), self.read_s.get(other, 0.0))
                self.host_bytes -= self.offer.size_bytes(other)
                self.steps.append(Free(self.offer.trips[other].host_tensor))
            self.out_s = self.host[t] = max(self.out_s, self.ready_s[t]) + self.offer.trips[t].out_s
            self.host_bytes += self.offer.size_bytes(t)
            self.steps.append(Compute(self.offer.trips[t].out_op))
        self.leaving[t] = max(self.host[t], self.ready_s[t])

    def fetch(self, t: int) -> None:
        """Tensor `t`, which has a copy on the host and is not in memory, is asked for."""
        begins_s = max(self.in_s, self.now_s, self.host[t])
        self.in_s = self.ready_s[t] = self.read_s[t] = begins_s + self.offer.trips[t].in_s
        self.live.add(t)
        self.memory_bytes += self.offer.size_bytes(t)
        self.steps.append(Compute(self.offer.trips[t].in_op))
