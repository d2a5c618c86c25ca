"""How many prompt tokens are read between two decode steps.

A step is given an allowance of tokens: one for every row that decodes, and what is left for chunks of prompts, as in
Sarathi-Serve (Agrawal et al., OSDI 2024, arXiv 2403.02310). Unlike there, a chunk is never cut to what is left, because
another chunk grid would keep other slots: it is delayed. One that is larger than the allowance waits until the steps
that it waited for have saved enough.
"""


class Allowance:
    """The tokens of the step under way.

    Args:
        tokens: Tokens of one step; at least 1.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._left = 0
        self._saves = False
        self._free = False

    def begin(self, decoding: int) -> None:
        """Begin a step in which some rows decode a token each.

        At least one token is left for prompts, so that a chunk comes to be read however many rows decode. If nothing
        decodes, there is nobody to be held up, and the first chunk may be of any size.
        """
        saved = self._left if self._saves else 0
        self._left = saved + max(1, self._tokens - decoding)
        self._saves = False
        self._free = decoding == 0

    def covers(self, chunk: int) -> bool:
        """Whether a chunk of so many tokens may be read now; if not, what is left is saved for it."""
        if self._free or chunk <= self._left:
            return True
        self._saves = True
        return False

    def spend(self, chunk: int) -> None:
        """Read a chunk, which was covered."""
        self._left = max(0, self._left - chunk)
        self._free = False
