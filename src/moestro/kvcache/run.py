"""Run: consecutive pages of one prefix that share one fate."""

from typing import Any


class Run:
    """A node of the prefix index: pages that are held, moved, split and evicted together.

    What is known of one page of it is true of all: so the cost of handling a prefix is the number
    of its runs, not of its pages. Owned by the PrefixIndex; the lists are equally long or empty.

    tokens: the ids in its pages, 4 little-endian bytes each. pages: its device pages. slots: its
    host slots. hashes: the names of its pages, once somebody needs them. stored: the store has
    said at stored_s that it has them; its budget may have taken them since. num_users: sequences
    whose published prefix runs through it; num_holders: those of them whose own pages these are.
    claims: what needs it to stay (see Claim). num_hits: how often a sequence found it; tried_at:
    its num_hits when it was last saved ahead of eviction. owner: the session (or request) that
    made it; None once another one has found it. ghosts: keys of the first pages of what was below
    it and has been forgotten, for telling why a prompt missed.
    """

    __slots__ = (
        "children",
        "claims",
        "ghosts",
        "hashes",
        "num_hits",
        "num_holders",
        "num_pages",
        "num_users",
        "owner",
        "pages",
        "parent",
        "priority",
        "slots",
        "stored",
        "stored_s",
        "tokens",
        "tried_at",
    )

    def __init__(
        self, parent: "Run | None", tokens: bytes | bytearray, num_pages: int, priority: int
    ) -> None:
        self.parent = parent
        self.tokens = bytearray(tokens)
        self.num_pages = num_pages
        self.priority = priority
        self.children: dict[bytes, Run] = {}
        self.pages: list[int] = []
        self.slots: list[int] = []
        self.hashes: list[bytes] = []
        self.stored = False
        self.stored_s = 0.0
        self.num_users = 0
        self.num_holders = 0
        self.num_hits = 0
        self.tried_at = -1
        self.owner: str | None = None
        self.claims: list[Any] = []
        self.ghosts: dict[int, None] = {}

    def note_stored(self, now_s: float) -> None:
        """The store says that it has these pages."""
        self.stored, self.stored_s = True, now_s

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def __repr__(self) -> str:
        where = [n for n in ("pages", "slots") if getattr(self, n)] + ["stored"] * self.stored
        return f"<Run of {self.num_pages} pages, {'+'.join(where) or 'nowhere'}>"
