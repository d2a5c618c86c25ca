"""Running ``eval passkey`` and ``eval needle``: at every length and place the full cache first, then the budgets."""

from collections.abc import Sequence
from functools import partial

from rich.console import Console

from scissorhands.eos import eos_ids
from scissorhands.evaluation.cells import Advance, Cell, Runner
from scissorhands.evaluation.decoding import MOST_ROWS, Decoder
from scissorhands.evaluation.recalling import Recall
from scissorhands.evaluation.request import FULL, Choice, Request
from scissorhands.evaluation.results import Results, Row
from scissorhands.evaluation.retrieval import KINDS, Kind, fact_of, hide
from scissorhands.evaluation.setup import Setup, prepare, tell_anew
from scissorhands.evaluation.sizes import governed_slots
from scissorhands.evaluation.texts import cuts_of
from scissorhands.grant import grant_text


def run(
    request: Request,
    kind: str,
    lengths: Sequence[int],
    positions: Sequence[float],
    seed: int,
    console: Console,
    recall: Recall | None = None,
) -> Results:
    """Measure what is asked for and not yet done; ``console`` shows how far it is.

    Args:
        request: What to measure; its sequences are the trials of a cell.
        kind: One of :data:`scissorhands.evaluation.retrieval.KINDS`.
        lengths: Tokens of prompt and answer.
        positions: Shares of the text that come before the fact.
        seed: Of the facts.
        console: Where progress is shown.
        recall: How to recall; every budget is measured without it and with it. None: without it only.

    Raises:
        InvalidRequestError: Something asked for is not possible; names the option.
        UnsupportedModelError: The model would not be served rightly.
    """
    setup = prepare(request)
    trials = _Trials(setup, KINDS[kind], seed)
    results = setup.results(kind, seed=seed, length=None)
    if request.out:
        tell_anew(request, results.resume(request.out), console)

    def measure(choice: Choice, length: int, position: float, how: Recall | None, advance: Advance) -> Row:
        row = trials.measure(choice, length, position, how, advance)
        full = row if choice == FULL else results.row_of(key_of(FULL, length, position))
        assert full is not None  # It is measured before.
        return row | {"full_success": full["success"]}

    cells = [
        Cell(
            label=f"{choice}{f', {how}' if how else ''}, {length} tokens, at {position:g}",
            key=key_of(choice, length, position, how),
            grant=grant_text(setup.grant(choice, length)),
            work=request.sequences * length,
            measure=partial(measure, choice, length, position, how),
        )
        for length in lengths
        for position in positions
        for choice in dict.fromkeys((FULL, *request.choices))
        for how in ((None, recall) if recall and choice != FULL else (None,))
    ]
    with Runner(results, request.out, console) as runner:
        runner.measure(cells, lambda row: f"{row['found']} of {row['trials']} found")
    return results


def key_of(choice: Choice, length: int, position: float, recall: Recall | None = None) -> Row:
    """Return the fields that name a row."""
    return {**choice.key(), "length": length, "position": position, "recall": recall.key() if recall else None}


class _Trials:
    """Measures cells on equal facts and equal text.

    Args:
        setup: The model.
        kind: What is hidden.
        seed: Of the facts.
    """

    def __init__(self, setup: Setup, kind: Kind, seed: int) -> None:
        self._setup = setup
        self._kind = kind
        self._facts = [fact_of(kind, seed, trial) for trial in range(setup.request.sequences)]
        self._texts: dict[int, list[list[int]]] = {}
        self._eos = eos_ids(setup.model, setup.tokenizer)

    def measure(self, choice: Choice, length: int, position: float, recall: Recall | None, advance: Advance) -> Row:
        """Answer all trials of a cell."""
        setup, kind = self._setup, self._kind
        granted = setup.grant(choice, length)
        prompts = [
            hide(fact, setup.tokenizer, filler, position, length - kind.new_tokens)
            for fact, filler in zip(self._facts, self._text(length), strict=True)
        ]
        found, sizes, recallers = [], None, []
        for start in range(0, len(prompts), MOST_ROWS):
            decoder = Decoder(setup.model, granted, prompts[start : start + MOST_ROWS], kind.new_tokens, recall)
            sizes = decoder.sizes()
            found += decoder.answer(kind.new_tokens, self._eos, advance)
            recallers += decoder.recallers
        assert sizes is not None
        texts = [str(setup.tokenizer.decode(answer, skip_special_tokens=True)).strip() for answer in found]
        right = [kind.found(text, fact.expected) for text, fact in zip(texts, self._facts, strict=True)]
        return {
            "slots": governed_slots(granted, setup.shape),
            "raised": granted.raised,
            **sizes.fields(setup.shape, length, setup.model.dtype),
            "trials": len(right),
            "found": sum(right),
            "success": sum(right) / len(right),
            "prompt_tokens": [len(prompt) for prompt in prompts],
            "expected": [fact.expected for fact in self._facts],
            "answers": texts,
            "recalled_slots": [recaller.recalled for recaller in recallers],
            "archive_bytes": [recaller.archived_bytes for recaller in recallers],
            "summary_bytes": [recaller.summary_bytes for recaller in recallers],
        }

    def _text(self, length: int) -> list[list[int]]:
        """Return the text of each trial; reading whole texts takes seconds, so it is kept."""
        if length not in self._texts:
            texts = list(self._setup.request.texts)
            self._texts[length] = cuts_of(texts, self._setup.tokenizer, len(self._facts), length).tolist()
        return self._texts[length]
