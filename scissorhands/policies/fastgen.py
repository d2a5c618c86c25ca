"""FastGen (Ge et al., ICLR 2024, arXiv 2310.01801): every head chooses what kind of tokens it lives on."""

import numpy as np
import numpy.typing as npt

from scissorhands.budget import EvictionParameters
from scissorhands.policies.base import Policy, Scores, common_parameters, lowest
from scissorhands.snapshot import LayerEvidence, TokenKind

# T, the share of a head's attention that its profile must recover; the paper measures 0.91 to 0.98.
RECOVERY = 0.95
# r_f and r_l, the shares of the slots that count as frequent and as local (section 4).
FREQUENT = 0.3
LOCAL = 0.3

Profile = npt.NDArray[np.bool_]


class FastGen(Policy):
    """Each head keeps the tokens of the cheapest profile that recovers the share :data:`RECOVERY` of its attention.

    The profiles are those of equation 2, each holding the one before it: special tokens; with punctuation; with the
    slots of the most attention mass; with the newest slots; all. Within a profile, and among the slots outside of it,
    those of the least mass go first.

    Differs from the published rule in this: FastGen lets a head that needs few tokens hold few, and one that needs all
    hold all, so nothing bounds what a row takes. Here every head of a layer holds equally many slots of a hard budget:
    a profile that takes less is filled up with the most frequent of the other tokens, and one that takes more loses
    its least frequent. FastGen chooses once, by the attention map of the prompt; here a head chooses anew at every
    eviction, by the attention that its slots have received so far, of which the profile's slots must hold the share. A
    KV head chooses for its group of query heads, by their mean. The first tokens and the newest are exempt
    whatever the profile.
    """

    name = "fastgen"

    def parameters(self, slots: int) -> EvictionParameters:
        """Return the numbers for a budget of ``slots``: the local share is recent, for new tokens have no frequency."""
        return common_parameters(slots, recent=int(LOCAL * slots))

    def signals(self, parameters: EvictionParameters) -> dict[str, int]:
        """Return the kind of each token, a byte."""
        del parameters
        return {"token_kind": 1}

    def score(self, evidence: LayerEvidence, step: int, parameters: EvictionParameters) -> Scores:
        """Return the attention mass, raised above all others' for the slots of the head's profile."""
        del step, parameters
        mass = evidence.signals["mass"].astype(np.float64)
        chosen = cheapest(profiles(mass, evidence.signals["token_kind"]), mass)
        above: Scores = mass + chosen * (mass.max(axis=1, keepdims=True) + 1)
        return above


def profiles(mass: Scores, kinds: npt.NDArray[np.generic]) -> list[Profile]:
    """Return of each profile the slots that it keeps, ``[kv_heads, n]``, from the cheapest to the full one.

    Args:
        mass: ``[kv_heads, n]``, attention received.
        kinds: ``[kv_heads, n]``, :class:`~scissorhands.snapshot.TokenKind` of each slot.
    """
    slots = mass.shape[1]
    special: Profile = kinds == TokenKind.SPECIAL
    punctuation = special | (kinds == TokenKind.PUNCTUATION)
    # Of equal mass the newer token counts as the more frequent.
    frequent = punctuation | ~lowest(mass, slots - int(FREQUENT * slots))
    local = frequent.copy()
    local[:, slots - int(LOCAL * slots) :] = True
    return [special, punctuation, frequent, local, np.ones_like(special)]


def cheapest(candidates: list[Profile], mass: Scores) -> Profile:
    """Return for each head the first of its profiles that holds the share :data:`RECOVERY` of its mass."""
    needed = RECOVERY * mass.sum(axis=1)
    chosen = candidates[-1].copy()
    for profile in reversed(candidates[:-1]):
        recovers = (mass * profile).sum(axis=1) >= needed
        chosen[recovers] = profile[recovers]
    return chosen
