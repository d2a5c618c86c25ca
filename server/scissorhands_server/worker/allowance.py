"""How many prompt tokens are read between two decode steps.

A step is given an allowance of tokens: one for every row that decodes, and what is left for chunks of prompts, as in
Sarathi-Serve (Agrawal et al., OSDI 2024, arXiv 2403.02310). Unlike there, a chunk is never cut to what is left, because
another chunk grid would keep other slots. Instead its forward pass is: between two layers of the model, when what the
layers so far have cost is all that the step allows, the rows that decode have their step before the pass goes on.
"""


class Allowance:
    """The tokens of the step under way.

    Args:
        tokens: Tokens of one step; at least 1.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._left = 0.0

    @property
    def spent(self) -> bool:
        """Whether the step may read no more."""
        return self._left <= 0

    def begin(self, decoding: int) -> None:
        """Begin a step in which some rows decode a token each.

        At least one token is left for prompts, so that they come to be read however many rows decode.
        """
        self._left = max(1.0, self._tokens - decoding)

    def spend(self, tokens: float) -> None:
        """Read tokens, or a part of the model's layers of more of them. If there was less left, nothing is."""
        self._left -= tokens
