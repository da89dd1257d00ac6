"""The task map of a step's attention: which thread's task computes which super-tiles.

A unit is a block of queries of one sequence and kv head: up to 64 rows (token, head of the group).
Keys are cut into super-tiles of 512 absolute positions. A unit is one task, or, where whole units
would leave threads waiting, several, each a range of its super-tiles. Who computes is all that a
plan decides: super-tiles start from fresh states and are merged in order, whoever had them.
"""

from dataclasses import astuple, dataclass

SUPER_TILE = 512
QUERY_ROWS = 64
TASKS_PER_PART = 8
"""Units are cut into tasks of at most this small a share of one part's work, or a super-tile."""
_WORDS = 8
"""int32 of the header and of each task."""


@dataclass(frozen=True, slots=True)
class PlanShape:
    """What a plan depends on beside lengths. row_bytes: one position's key and value of one kv
    head, scales included. num_parts: threads that share the work."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    row_bytes: int
    num_parts: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of queries."""
        return max(1, QUERY_ROWS // self.group)

    def capacity(self, num_seqs: int, num_tokens: int) -> int:
        """int32 that a plan may take, whatever the lengths."""
        units = self.num_kv_heads * (num_seqs + num_tokens // self.block_tokens)
        return _WORDS * (1 + units + 4 * TASKS_PER_PART * self.num_parts)


@dataclass(frozen=True, slots=True)
class PlanTask:
    """Super-tiles [begin, end) of a block of queries.

    cut: number of its unit among those of several tasks, or -1. The first task of a cut unit leaves
    one softmax state in `slot`; super-tile s of a later one goes to slot + 1 + s - first_end.
    """

    seq: int
    kv_head: int
    block: int
    begin: int
    end: int
    cut: int
    slot: int
    first_end: int


@dataclass(frozen=True, slots=True)
class Unit:
    """A block of `rows` query rows that reads `length` positions."""

    seq: int
    block: int
    rows: int
    length: int

    @property
    def num_supers(self) -> int:
        return -(-self.length // SUPER_TILE)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Tasks in the order in which they are taken: most expensive first."""

    tasks: tuple[PlanTask, ...]
    num_cut: int
    num_slots: int
    state_rows: int

    def words(self, shape: PlanShape, num_seqs: int, num_tokens: int) -> list[int]:
        """As attention takes it: a header of eight int32, then eight a task."""
        sizes = (num_seqs, shape.num_kv_heads, shape.group, num_tokens)
        header = [len(self.tasks), self.num_cut, self.num_slots, self.state_rows, *sizes]
        return header + [word for task in self.tasks for word in astuple(task)]


def position_cost(shape: PlanShape, rows: int) -> int:
    """Cost of one position for so many query rows: twice the bytes of KV read, and D a row.

    A row takes 4 D operations a position; a core does about eight of them in the time in which it
    reads a byte.
    """
    return 2 * shape.row_bytes + rows * shape.head_dim


def find_units(query_start_loc: list[int], seq_lens: list[int], shape: PlanShape) -> list[Unit]:
    """The blocks of queries of a batch; every kv head has the same."""
    units = []
    for seq, length in enumerate(seq_lens):
        count = query_start_loc[seq + 1] - query_start_loc[seq]
        for skip in range(0, count, shape.block_tokens):
            tokens = min(shape.block_tokens, count - skip)
            block = skip // shape.block_tokens
            units.append(Unit(seq, block, tokens * shape.group, length - count + skip + tokens))
    return units


def make_plan(query_start_loc: list[int], seq_lens: list[int], shape: PlanShape) -> AttentionPlan:
    """The plan of a batch: csrc/attention_plan.cpp gives the same one."""
    units = find_units(query_start_loc, seq_lens, shape)
    most = _largest_task(units, shape)
    steps = []
    for unit in units:
        step = unit.num_supers
        if most is not None and _cost(unit, shape) > most:
            step = min(step, max(1, most // (SUPER_TILE * position_cost(shape, unit.rows))))
        steps.append(step)
    return cut_units(units, steps, shape)


def cut_units(units: list[Unit], steps: list[int], shape: PlanShape) -> AttentionPlan:
    """Cut each unit into tasks of steps[i] super-tiles and put the most expensive ones first."""
    costs, tasks = [], []
    num_cut = num_slots = state_rows = 0
    for unit, step in zip(units, steps, strict=True):
        each, supers = position_cost(shape, unit.rows), unit.num_supers
        for kv_head in range(shape.num_kv_heads):
            cut, slot = (num_cut, num_slots) if step < supers else (-1, -1)
            if cut >= 0:
                num_cut += 1
                num_slots += 1 + supers - step
                state_rows = max(state_rows, unit.rows)
            for begin in range(0, supers, step):
                end = min(begin + step, supers)
                positions = min(end * SUPER_TILE, unit.length) - begin * SUPER_TILE
                costs.append(positions * each)
                tasks.append(PlanTask(unit.seq, kv_head, unit.block, begin, end, cut, slot, step))
    order = sorted(range(len(tasks)), key=lambda i: -costs[i])
    return AttentionPlan(tuple(tasks[i] for i in order), num_cut, num_slots, state_rows)


def _cost(unit: Unit, shape: PlanShape) -> int:
    return unit.length * position_cost(shape, unit.rows)


def _largest_task(units: list[Unit], shape: PlanShape) -> int | None:
    """Cost above which a unit is cut; None where whole units balance well enough.

    That is when giving each in turn, largest first, to the part with the least so far leaves no
    part with a sixteenth more than the mean.
    """
    costs = sorted((_cost(unit, shape) for unit in units), reverse=True)
    if shape.num_parts < 2 or not costs:
        return None
    total = sum(costs) * shape.num_kv_heads
    most = total // (shape.num_parts * TASKS_PER_PART)
    if costs[0] <= most:
        return None
    loads = [0] * shape.num_parts
    for cost in costs:
        for _ in range(shape.num_kv_heads):
            loads[loads.index(min(loads))] += cost
    mean = total // shape.num_parts
    return None if max(loads) <= mean + mean // 16 else most
