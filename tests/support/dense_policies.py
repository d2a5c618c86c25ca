"""What some policies make of a dense sequence's attention, keys and values: slow, plain, and from the papers.

Part of the reference: nothing of the program is imported here. ``keep`` is ``[kv_heads, tokens]``, the tokens that are
still in the cache; what is told of the others means nothing.
"""

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def kind_of(token: int) -> int:
    """Return what a token id is taken for: 2, special, every 23rd; of the others 1, punctuation, every 6th; else 0."""
    if token % 23 == 0:
        return 2
    return 1 if token % 6 == 0 else 0


def fastgen(keep: Mask, mass: Array, kinds: Array) -> Array:
    """Return the mass, raised far for the tokens of the smallest set that holds 95 % of a head's mass."""
    scores = mass.copy()
    for head in range(len(keep)):
        tokens = np.flatnonzero(keep[head]).tolist()
        weight = {token: float(mass[head, token]) for token in tokens}
        share = int(0.3 * len(tokens))
        by_mass = sorted(tokens, key=lambda token: (weight[token], token))
        sets = [{token for token in tokens if kinds[head, token] == 2}]
        sets.append(sets[-1] | {token for token in tokens if kinds[head, token] == 1})
        sets.append(sets[-1] | set(by_mass[len(tokens) - share :]))
        sets.append(sets[-1] | set(tokens[len(tokens) - share :]))
        enough = 0.95 * sum(weight.values())
        chosen = next((found for found in sets if sum(weight[token] for token in found) >= enough), set(tokens))
        scores[head, list(chosen)] += 1e6
    return scores


def r_kv(keep: Mask, importance: Array, similarity: Array) -> Array:
    """Return a tenth of the importance less nine tenths of the softmax of the similarities."""
    scores = np.zeros(keep.shape)
    for head, kept in enumerate(keep):
        weights = np.exp(similarity[head, kept])
        scores[head, kept] = 0.1 * importance[head, kept] - 0.9 * weights / weights.sum()
    return scores


def redundancy(keep: Mask, keys: torch.Tensor) -> Array:
    """Return the mean cosine of each token's key with those of the tokens of which it is not the latest alike."""
    found = np.zeros(keep.shape)
    for head, kept in enumerate(keep):
        directions = keys[head, np.flatnonzero(kept)].double().numpy()
        # A token without an embedding, such as padding that a model generates, may have a key of zeros.
        directions /= np.linalg.norm(directions, axis=1, keepdims=True) + 1e-8
        cosines = directions @ directions.T
        for one, row in enumerate(cosines):
            row[one] = 0
            alike = np.flatnonzero(row > 0.5)
            row[alike[-1:]] = 0
        found[head, kept] = cosines.mean(axis=0)
    return found


def expected_attention(keep: Mask, scores: Array, values: torch.Tensor, now: int) -> Array:
    """Return the attention that a Gaussian query is expected to give each token, times the norm of its value.

    Args:
        keep: The tokens kept.
        scores: ``[query_heads, queries, tokens]``, scaled products of queries and keys.
        values: ``[kv_heads, tokens, head_dim]``.
        now: Queries that there have been.
    """
    found = np.zeros(keep.shape)
    group = len(scores) // len(keep)
    for head in range(len(keep)):
        # The first four tokens stay out.
        tokens = [token for token in np.flatnonzero(keep[head]).tolist() if token >= 4]
        if not tokens:
            continue
        for query_head in range(head * group, (head + 1) * group):
            # A token is seen by all queries from its own on.
            seen = [scores[query_head, token:now, token] for token in tokens]
            logits = np.array([of_token.mean() + of_token.var() / 2 for of_token in seen])
            weights = np.exp(logits - logits.max())
            found[head, tokens] += weights / weights.sum() / group
        found[head, tokens] *= values[head, tokens].double().norm(dim=-1).numpy()
    return found
