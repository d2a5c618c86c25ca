"""Tokens: files of them, what a caller sends, and where it does not."""

import hashlib

import pytest

from scissorhands.credentials import Credentials
from scissorhands.errors import ConfigurationError, InvalidRequestError
from scissorhands.token_channel import Token
from scissorhands_server.tenants import Caller, Tokens

TOKEN = "a-token-that-nobody-guesses-1"
DIGEST = hashlib.sha256(TOKEN.encode()).hexdigest()
GOOD = f'[[token]]\nsha256 = "{DIGEST}"\ntenant = "acme"\nrole = "client"\n'


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text(GOOD)
    return path


def test_a_token_stands_for_a_tenant_and_a_role(file):
    tokens = Tokens(file)
    assert tokens.caller(TOKEN) == Caller("acme", "client")
    assert tokens.caller(TOKEN + "x") is None
    # Who reads the file has no token.
    assert tokens.caller(DIGEST) is None


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(file, caplog):
    tokens = Tokens(file)
    file.write_text(f"{GOOD}nonsense = 'hush'\n")
    assert tokens.caller(TOKEN) == Caller("acme", "client")
    assert "tokens stay as they were" in caplog.text
    assert "hush" not in caplog.text
    file.unlink()
    assert tokens.caller(TOKEN) == Caller("acme", "client")
    file.write_text(GOOD.replace("client", "operator"))
    assert tokens.caller(TOKEN) == Caller("acme", "operator")
    file.write_text("")
    assert tokens.caller(TOKEN) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hush", "is no TOML"),
        ("hush = 1", "tables"),
        (GOOD + "more = 'hush'", "unknown keys; allowed: sha256, tenant, role"),
        (GOOD.replace(DIGEST, "hush"), "token 1: sha256 must be"),
        (GOOD.replace("acme", "hush hush"), "token 1: tenant must be"),
        (GOOD.replace("client", "hush"), "token 1: role must be one of client, worker, operator"),
        (GOOD + GOOD, "token 2 is there twice"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_without_quoting_it(file, text, message):
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=r"tokens_file: .*tokens\.toml") as caught:
        Tokens(file)
    assert message in str(caught.value)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "short", "two words that are long enough", "ü" * 30])
def test_a_file_that_holds_no_token_is_refused_without_quoting_it(tmp_path, text):
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match=r"token_file: .*token") as caught:
        Credentials(token_file=path).check()
    assert text == "" or text not in str(caught.value)


def test_a_token_is_sent_only_with_tls_or_to_this_machine(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    credentials = Credentials(token_file=path)
    for address in ("worker:50051", "10.0.0.1:50051", "localhost.example:50051", "ipv4:127.0.0.1:1,10.0.0.1:1"):
        with pytest.raises(InvalidRequestError, match="is not sent to"):
            credentials.channel(address, ())
    for address in ("localhost:50051", "127.0.0.1:50051", "[::1]:50051", "ipv4:127.0.0.1:1,127.0.0.2:1"):
        credentials.channel(address, ()).close()


def test_a_renewed_token_is_sent_at_the_next_call(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    token = Token(path)
    assert token.metadata() == (("authorization", f"Bearer {TOKEN}"),)
    path.write_text(TOKEN + "-and-another\n")
    assert token.metadata() == (("authorization", f"Bearer {TOKEN}-and-another"),)
    path.write_text("")
    assert token.metadata() == (("authorization", f"Bearer {TOKEN}-and-another"),)
