"""What clients ask, and what each question is answered by a worker that has nothing else to do."""

import asyncio
import dataclasses
from dataclasses import dataclass

from support.faults.worker import WorkerProcess
from support.tiny_models import random_tokens
from support.tiny_worker import tiny_folder

from scissorhands_client import AsyncClient, Budget, GenerateOptions, TokenIds


@dataclass(frozen=True)
class Question:
    """A prompt, how it is answered, and the whole answer.

    Args:
        ids: The prompt.
        options: How.
        tokens: The answer's tokens.
    """

    ids: tuple[int, ...]
    options: GenerateOptions
    tokens: tuple[int, ...] = ()

    @property
    def prompt(self):
        return TokenIds(self.ids)


@dataclass(frozen=True)
class Conversation:
    """Two turns; the second's prompt begins with all of the first."""

    first: Question
    second: Question

    def named(self, session_id):
        """Return both turns, held under an id."""
        return [
            dataclasses.replace(turn, options=dataclasses.replace(turn.options, session_id=session_id))
            for turn in (self.first, self.second)
        ]


@dataclass(frozen=True)
class Questions:
    """What is asked.

    Args:
        short: With small budgets, full caches and packed slots: each evicts, keeps, or packs.
        long: Answers that take as long as the model allows.
        conversations: With full caches, whose answers are alike whether a turn goes on or begins anew.
    """

    short: list[Question]
    long: list[Question]
    conversations: list[Conversation]


def _question(length, new, seed, **options):
    given = GenerateOptions(max_new_tokens=new, ignore_eos=True, **options)
    return Question(tuple(random_tokens(length, seed=seed).tolist()), given)


_SHORT = [
    *(_question(100, 120, seed, budget=Budget.tokens(40)) for seed in range(3)),
    *(_question(60, 100, seed, policy="full") for seed in range(10, 12)),
    *(_question(200, 60, seed, policy="h2o", budget=Budget.tokens(64)) for seed in range(20, 22)),
    _question(80, 60, 30, policy="full", resident_codec="int4"),
]
_LONG = [_question(70, 420, seed, budget=Budget.tokens(40)) for seed in range(40, 44)]
_TURNS = [
    (_question(70, 25, seed, policy="full"), tuple(random_tokens(20, seed=seed + 1).tolist())) for seed in (50, 60)
]


async def solo_questions(folder):
    """Return all questions with what a worker without a manager answers, asked for one at a time."""
    worker = await asyncio.to_thread(WorkerProcess, tiny_folder(), folder / "solo.log", log_level="warning")
    try:
        async with AsyncClient(f"127.0.0.1:{worker.port}", timeout=60) as client:
            await client.wait_ready(30)

            async def answered(question):
                result = await client.generate(question.prompt, question.options).result()
                return dataclasses.replace(question, tokens=result.token_ids)

            conversations = []
            for plain, more in _TURNS:
                first = await answered(plain)
                second = await answered(dataclasses.replace(plain, ids=(*first.ids, *first.tokens, *more)))
                conversations.append(Conversation(first, second))
            short, long = [[await answered(each) for each in kind] for kind in (_SHORT, _LONG)]
    finally:
        worker.stop()
    return Questions(short, long, conversations)
