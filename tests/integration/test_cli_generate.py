"""``scissorhands generate`` and ``chat`` as processes, against a real gRPC server."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from support.scripted_worker import scripted_worker

# Longer than anything here takes, in seconds.
PATIENCE = 60


@pytest.fixture(scope="module")
def serving():
    with scripted_worker() as worker:
        yield worker


@pytest.fixture
def worker(serving):
    serving.script.reset()
    return serving


def command(worker, *arguments):
    return [sys.executable, "-m", "scissorhands", *arguments, "--server", worker.address]


def run(worker, *arguments, stdin=None):
    return subprocess.run(
        command(worker, *arguments), input=stdin, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def test_the_answer_goes_to_stdout_and_the_table_to_stderr(worker):
    done = run(worker, "generate", "tell", "--budget", "20%", "--policy", "scissorhands:paper", "--param", "recent=10")
    assert done.returncode == 0
    assert done.stdout == "Héllo wörld\n"
    for expected in (
        "100 prompt, 5 generated",
        "stopped at '[/end]'",
        "64 slots per layer and KV head, scissorhands:default, raised to the smallest, granted by the manager",
        "40.0 kB (20.0 kB in 16 bits)",
        "4.0 kB",
        "5.00x against 16 bits, 10.00x against its own",
        "1,234 slots in 3 evictions",
        "6.25%",
        "2 from the manager, 1 local",
        "0.012 s",
        "3 offloaded (5.0 kB), 1 dropped",
        "2.0 tokens/s",
        "after 1.500 s, 0.250 s of it queued",
        "session-1",
    ):
        assert expected in " ".join(done.stderr.split())
    (request,) = worker.script.requests
    assert request.budget.fraction == 0.2
    assert (request.policy.name, request.policy.preset, dict(request.policy.parameters)) == (
        "scissorhands",
        "paper",
        {"recent": 10},
    )


def test_every_option_reaches_the_server(worker):
    options = ["--max-new-tokens", "9", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "3", "--seed", "11"]
    options += ["--repetition-penalty", "1.1", "--stop", "a", "--stop", "b", "--ignore-eos", "--model", "scripted"]
    options += ["--session", "talk-1"]
    assert run(worker, "generate", "tell", "--chat", "--quiet", *options).returncode == 0
    (request,) = worker.script.requests
    sampling = request.sampling
    assert (request.max_new_tokens, request.model, list(request.stop)) == (9, "scripted", ["a", "b"])
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 3, 11)
    assert sampling.repetition_penalty == 1.1
    assert request.ignore_eos
    assert request.session_id == "talk-1"
    assert [(each.role, each.content) for each in request.chat.messages] == [("user", "tell")]


def test_quiet_prints_the_answer_alone(worker):
    done = run(worker, "generate", "tell", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Héllo wörld\n", "")


def test_json_is_one_object_with_everything(worker):
    done = run(worker, "generate", "tell", "--json")
    assert done.returncode == 0
    answer = json.loads(done.stdout)
    assert answer["text"] == "Héllo wörld"
    assert answer["token_ids"] == [1, 2, 3, 4, 5]
    assert (answer["finish_reason"], answer["stop"], answer["seed"]) == ("stop", "[/end]", 7)
    assert answer["grant"]["layer_slots"] == [64, 64]
    assert answer["grant"]["source"] == "manager"
    assert answer["usage"]["time_to_first_token_seconds"] == 1.5
    assert answer["usage"]["tokens_per_second"] == 2.0
    assert answer["cache"]["compression_16bit"] == 5.0
    assert answer["cache"]["segments_dropped"] == 1
    assert done.stderr == ""


def test_the_prompt_comes_from_a_file_and_from_stdin(worker, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("a long text\n\n", encoding="utf-8")
    assert run(worker, "generate", "--file", str(file), "--quiet").returncode == 0
    assert run(worker, "generate", "and a question", "--file", str(file), "--quiet").returncode == 0
    assert run(worker, "generate", "-", "--quiet", stdin="from stdin\n").returncode == 0
    assert [request.text for request in worker.script.requests] == [
        "a long text",
        "a long text\n\nand a question",
        "from stdin\n",
    ]


@pytest.mark.parametrize(
    ("prompt", "code", "message"),
    [
        ("refuse", 2, "--top-p (sampling.top_p): must be above 0 and at most 1, got 2"),
        ("small-budget", 2, "--budget (budget.tokens): too small for this policy: the smallest is 52 tokens, got 3"),
        ("other-model", 1, "model: no model 'other'; this worker serves 'scripted'"),
        ("full", 1, "the server is full: the queue of 8 requests is full; try again in 2.5 s"),
        ("crash", 1, "internal error; see the log"),
        ("unfinished", 1, "the stream ended without a finish event"),
    ],
)
def test_failures_are_one_line_and_a_code(worker, prompt, code, message):
    done = run(worker, "generate", prompt, "--quiet")
    assert done.returncode == code
    assert done.stderr == f"Error: {message}\n"


def test_what_came_before_a_failure_ends_with_a_line(worker):
    assert run(worker, "generate", "crash", "--quiet").stdout == "half an ans\n"
    assert run(worker, "generate", "crash", "--json").stdout == ""


def test_a_slow_answer_ends_at_the_timeout(worker):
    done = run(worker, "generate", "silence", "--timeout", "0.3", "--quiet")
    assert done.returncode == 1
    assert "allow more with --timeout" in done.stderr
    assert worker.script.cancelled.wait(PATIENCE)


def test_a_proxy_of_the_environment_is_not_for_this_machine(worker):
    done = subprocess.run(
        command(worker, "generate", "tell", "--quiet"),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, "http_proxy": "http://127.0.0.1:1", "no_proxy": ""},
    )
    assert (done.returncode, done.stdout) == (0, "Héllo wörld\n")


def test_nobody_at_the_address():
    alone = [sys.executable, "-m", "scissorhands", "generate", "tell", "--server", "127.0.0.1:1", "--quiet"]
    done = subprocess.run(alone, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: nothing answers at 127.0.0.1:1 (")
    assert "scissorhands up --model" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["generate", "hang"], ["generate", "silence"], ["generate", "hang", "--json"]])
def test_ctrl_c_cancels_at_the_server(worker, arguments):
    # Whoever runs the tests in the background may have taken Ctrl-C away from their processes.
    words = ["env", "--default-signal=INT", *command(worker, *arguments)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert worker.script.started.wait(PATIENCE)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert told.splitlines()[-1] == "Error: cancelled"
    assert "Traceback" not in told
    assert worker.script.cancelled.wait(PATIENCE)


def test_a_reader_that_goes_away_cancels_at_the_server(worker):
    reading, writing = os.pipe()
    process = subprocess.Popen(command(worker, "generate", "hang", "--quiet"), stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    os.close(reading)
    try:
        _, told = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    assert b"Traceback" not in told
    assert worker.script.cancelled.wait(PATIENCE)


def test_an_ascii_terminal_loses_characters_not_the_answer(worker):
    done = subprocess.run(
        command(worker, "generate", "tell", "--quiet"),
        capture_output=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stdout) == (0, b"H?llo w?rld\n")


def test_chat_keeps_the_conversation(worker):
    turns = "first\nsecond\n/stats\n/nonsense\n/reset\nthird\n/exit\nnever\n"
    done = run(worker, "chat", "--system", "be brief", stdin=turns)
    assert done.returncode == 0
    assert done.stdout == "Héllo wörld\n" * 3
    assert "1,234 slots in 3 evictions" in done.stderr
    assert "unknown command" in done.stderr
    told = [[(each.role, each.content) for each in request.chat.messages] for request in worker.script.requests]
    opening = [("system", "be brief"), ("user", "first")]
    assert told == [
        opening,
        [*opening, ("assistant", "Héllo wörld"), ("user", "second")],
        [("system", "be brief"), ("user", "third")],
    ]
    (session_id,) = {request.session_id for request in worker.script.requests}
    assert re.fullmatch(r"[A-Za-z0-9_-]{20,64}", session_id)


def test_chat_keeps_nothing_if_asked_not_to(worker):
    assert run(worker, "chat", "--no-keep", "--quiet", stdin="first\nsecond\n").returncode == 0
    assert [request.session_id for request in worker.script.requests] == ["", ""]


def test_chat_ends_at_the_first_failure_of_a_pipe(worker):
    done = run(worker, "chat", "--quiet", stdin="tell\nrefuse\nnever\n")
    assert (done.returncode, done.stdout) == (2, "Héllo wörld\n")
    assert done.stderr == "Error: --top-p (sampling.top_p): must be above 0 and at most 1, got 2\n"
    assert len(worker.script.requests) == 2


def test_chat_needs_a_template(worker):
    worker.script.chat = False
    done = run(worker, "chat", stdin="tell\n")
    assert done.returncode == 1
    assert done.stderr == "Error: scripted has no chat template; use 'scissorhands generate' instead\n"
