"""Configuration of any content: settings are read or refused as such, tokens' files as well."""

import os
from unittest.mock import patch

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from scissorhands.errors import ConfigurationError
from scissorhands_server.manager.command import manager
from scissorhands_server.manager.settings import ManagerSettings
from scissorhands_server.settings import load_settings, variable
from scissorhands_server.tenants import Tokens
from scissorhands_server.worker.command import worker
from scissorhands_server.worker.settings import WorkerSettings

few = settings(max_examples=50, deadline=None, derandomize=True, database=None)

KINDS = [ManagerSettings, WorkerSettings]
# What a variable of the environment can hold.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
NUMBERS = st.one_of(st.integers(-(1 << 70), 1 << 70), st.floats())
TOML_VALUES = st.one_of(
    NUMBERS.map(str),
    st.sampled_from(["true", "[]", "{}", "1979-05-27", "[[1]]", "0x" + "f" * 40, "9" * 5000, "[" * 2000, "{a=" * 2000]),
    st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters='"\\'), max_size=12).map(
        '"{}"'.format
    ),
)


def read(kind, command_line=None, config=None, environment=()):
    """Return settings, or None if they were refused as configuration."""
    with patch.dict(os.environ, dict(environment)):
        try:
            return load_settings(kind, command_line, config)
        except ConfigurationError:
            return None


@pytest.mark.parametrize("kind", KINDS)
def test_settings_of_any_content_are_read_or_refused(kind, tmp_path):
    names = st.sampled_from(sorted(kind.model_fields))
    config = tmp_path / "settings.toml"

    @few
    @given(
        st.dictionaries(names | st.just("unknown"), TOML_VALUES, max_size=4), st.dictionaries(names, TEXTS, max_size=3)
    )
    def check(file, environment):
        config.write_text("".join(f"{name} = {value}\n" for name, value in file.items()), encoding="utf-8")
        found = read(kind, None, config, {variable(kind, name): value for name, value in environment.items()})
        assert found is None or "unknown" not in file

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_options_of_any_content_are_read_or_refused(kind):
    @few
    @given(st.dictionaries(st.sampled_from(sorted(kind.model_fields)), NUMBERS | TEXTS, max_size=4))
    def check(given_options):
        read(kind, given_options)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_settings_are_read_as_they_were_given(kind, tmp_path):
    config = tmp_path / "settings.toml"
    ports = st.integers(0, 65535)

    @few
    @given(ports, ports, ports)
    def check(on_file, in_environment, on_line):
        config.write_text(f"port = {on_file}\nmetrics_port = {on_file}\n")
        environment = {variable(kind, "metrics_port"): str(in_environment)}
        needed = {"model": "tiny"} if kind is WorkerSettings else {}
        found = read(kind, needed, config, environment)
        assert (found.port, found.metrics_port) == (on_file, in_environment)
        assert read(kind, {**needed, "port": on_line}, config, environment).port == on_line

    check()


@pytest.mark.parametrize("command", [manager, worker])
def test_words_of_the_command_line_end_in_order(command):
    """A word that is no setting ends the command by its own message, before it begins to serve."""

    @few
    @given(st.lists(TEXTS, max_size=3))
    def check(words):
        result = CliRunner().invoke(command, ["--port", "none", *words])
        assert result.exit_code in {0, 2}, result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)

    check()


@pytest.mark.parametrize(
    "text", [b"a = " + b"[" * 100_000, b"a = " + b"9" * 10_000, b"\xff\xfe", b"a = 1979-13-45", b"\0"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_files_that_break_their_reader_are_refused(kind, text, tmp_path):
    path = tmp_path / "broken.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigurationError, match=r"broken\.toml"):
        load_settings(kind, None, path)
    with pytest.raises(ConfigurationError, match=r"broken\.toml"):
        Tokens(path)


def test_files_of_tokens_of_any_content_are_read_or_refused(tmp_path):
    path = tmp_path / "tokens.toml"
    digests = st.binary(min_size=32, max_size=32).map(lambda raw: f'"{raw.hex()}"')
    values = st.one_of(TOML_VALUES, digests, st.sampled_from(['"acme"', '"client"', '"operator"']))
    keys = st.sampled_from(["sha256", "tenant", "role", "role", "more"])
    tables = st.lists(st.dictionaries(keys, values, max_size=4), max_size=3)

    @few
    @given(tables, st.binary(max_size=20))
    def check(entries, rest):
        text = "".join(
            "[[token]]\n" + "".join(f"{key} = {value}\n" for key, value in entry.items()) for entry in entries
        )
        for content in (text.encode(), text.encode() + rest, rest):
            path.write_bytes(content)
            try:
                tokens = Tokens(path)
            except ConfigurationError:
                continue
            assert tokens.caller("nobody") is None

    check()
