import pytest
from click.testing import CliRunner

from scissorhands_client.commands.chat import chat
from scissorhands_client.commands.failures import failure
from scissorhands_client.commands.generate import generate
from scissorhands_client.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a PROMPT"),
        (["x", "--budget", "20y"], "bytes (64MiB) or how many times smaller (20x), got '20y'"),
        (["x", "--budget", "120%"], "must be above 0 and at most 1, got 1.2"),
        (["x", "--policy", "h2o", "--param", "recent"], "give NAME=VALUE with a whole number"),
        (["x", "--policy", "h2o", "--param", "recent=-1"], "give NAME=VALUE with a whole number"),
        (["x", "--policy", "h2o", "--param", "=1"], "give NAME=VALUE with a whole number"),
        (["x", "--param", "recent=1"], "--param needs --policy"),
        (["x", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["x", "--timeout", "0"], "--timeout"),
        (["x", "--timeout", "nan"], "--timeout"),
        (["x", "--top-k", "many"], "--top-k"),
        (["x", "--file", "/nowhere"], "does not exist"),
        (["x", "--nonsense"], "No such option"),
    ],
)
def test_bad_usage_names_the_option_and_the_fix(arguments, message):
    result = CliRunner().invoke(generate, arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--server", "localhost"], "address: must be HOST:PORT"),
        (["x", "--top-k", "-1"], "--top-k (sampling.top_k): must be between 0 and"),
        (["x", "--seed", "-1"], "--seed (sampling.seed): must be between 0 and"),
        (["x", "--policy", "h2o", "--param", "recent=4294967296"], "--param (policy.parameters.recent): must be"),
    ],
)
def test_what_the_client_refuses_is_one_line(arguments, message):
    result = CliRunner().invoke(generate, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {message}")
    assert len(result.stderr.splitlines()) == 1


def test_input_that_is_not_text(tmp_path):
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\xfe")
    for result in (
        CliRunner().invoke(generate, ["--file", str(file)]),
        CliRunner().invoke(generate, ["-"], input=b"\xff\xfe"),
    ):
        assert result.exit_code == 2
        assert "is not UTF-8 text" in result.stderr


def test_chat_takes_the_same_options():
    names = {option for parameter in chat.params for option in parameter.opts}
    assert {"--budget", "--policy", "--param", "--max-new-tokens", "--seed", "--server", "--system"} <= names


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("budget.tokens", "--budget (budget.tokens): wrong"),
        ("policy.name", "--policy (policy.name): wrong"),
        ("policy.parameters.recent", "--param (policy.parameters.recent): wrong"),
        ("chat.messages", "PROMPT (chat.messages): wrong"),
        ("budgetary", "budgetary: wrong"),
    ],
)
def test_a_refused_field_is_told_with_its_option(field, told):
    assert failure(InvalidRequestError.local(field, "wrong"), "here:1").message == told


def test_a_message_of_many_lines_becomes_one():
    assert failure(InvalidRequestError.local("stop", "one\n  two"), "here:1").message == "--stop (stop): one two"
