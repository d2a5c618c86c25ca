"""Where settings come from, which source wins, and what is refused."""

import pytest
from click.testing import CliRunner

from scissorhands.errors import ConfigurationError
from scissorhands_server.manager.command import manager
from scissorhands_server.manager.settings import ManagerSettings
from scissorhands_server.settings import load_settings, variable


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ManagerSettings.model_fields:
        monkeypatch.delenv(variable(ManagerSettings, name), raising=False)


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "manager.toml"
        path.write_text(text)
        return path

    return write


def test_defaults():
    settings = load_settings(ManagerSettings)
    assert (settings.port, settings.metrics_port) == (50052, 9102)
    assert (settings.lease, settings.retention, settings.segment_ttl) == (30, 600, 600)
    assert (settings.budget_fraction, settings.policy, settings.codec) == (0.2, "scissorhands", "int4")
    assert settings.budgets == "given"


def test_command_line_wins_over_environment_over_file(monkeypatch, toml):
    config = toml("port = 1\nmetrics_port = 2\nlease = 3.5\n")
    monkeypatch.setenv("SCISSORHANDS_MANAGER_PORT", "4")
    monkeypatch.setenv("SCISSORHANDS_MANAGER_METRICS_PORT", "5")
    settings = load_settings(ManagerSettings, {"port": 6, "metrics_port": None}, config)
    assert (settings.port, settings.metrics_port, settings.lease) == (6, 5, 3.5)


def test_an_unknown_variable_with_our_prefix_is_refused(monkeypatch):
    monkeypatch.setenv("SCISSORHANDS_MANAGER_STORE_ULR", "redis://x")
    with pytest.raises(ConfigurationError, match=r"SCISSORHANDS_MANAGER_STORE_ULR.*SCISSORHANDS_MANAGER_STORE_URL"):
        load_settings(ManagerSettings)


def test_variables_of_others_are_left_alone(monkeypatch):
    monkeypatch.setenv("SCISSORHANDS_WORKER_NONSENSE", "1")
    load_settings(ManagerSettings)


def test_an_unknown_key_in_the_file_is_refused(toml):
    with pytest.raises(ConfigurationError, match=r"unknown key prot; allowed: .*port"):
        load_settings(ManagerSettings, config=toml("prot = 1\n"))


def test_a_file_that_is_not_toml_is_refused(toml):
    with pytest.raises(ConfigurationError, match=r"manager\.toml"):
        load_settings(ManagerSettings, config=toml("port: 1\n"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "70000"),
        ("port", "http"),
        ("lease", "0"),
        ("lease", "nan"),
        ("budget_fraction", "0"),
        ("budget_fraction", "1.5"),
        ("max_segment_bytes", str(1 << 30)),
        ("plan_threads", "0"),
        ("budgets", "equal"),
        ("budgets_renewal", "0"),
    ],
)
def test_a_value_out_of_range_names_the_setting_and_its_spellings(monkeypatch, name, value):
    monkeypatch.setenv(variable(ManagerSettings, name), value)
    with pytest.raises(ConfigurationError) as caught:
        load_settings(ManagerSettings)
    for spelling in (name, f"--{name.replace('_', '-')}", variable(ManagerSettings, name)):
        assert spelling in str(caught.value)


def test_a_store_that_is_no_redis_is_refused_without_telling_its_password():
    with pytest.raises(ConfigurationError, match="redis://") as caught:
        load_settings(ManagerSettings, {"store_url": "http://user:secret@host"})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"store_url": "redis+sentinel://hush@h"}, "store_url: must end with the name"),
        ({"store_url": "redis://h", "store_ca_file": "CA"}, "store_url: must begin with rediss"),
        ({"store_url": "redis://h", "store_verify": False}, "store_url: must begin with rediss"),
        ({"store_url": "rediss://h", "store_ca_file": "FILE"}, "store_ca_file: "),
        ({"store_url": "rediss://h", "store_certificate": "none.pem"}, "store_certificate: none.pem cannot be used"),
        ({"store_url": "rediss://h", "store_key": "FILE"}, "store_key: needs store_certificate"),
        ({"store_url": "redis://h", "store_password_file": "none"}, "store_password_file: "),
        ({"store_password": "hush", "store_password_file": "FILE"}, "store_password_file: leave it out"),
    ],
)
def test_what_is_wrong_with_the_access_to_the_store_is_told(tmp_path, given, message):
    file = tmp_path / "file"
    file.write_text("hush")
    with pytest.raises(ConfigurationError) as caught:
        load_settings(ManagerSettings, {name: str(file) if value == "FILE" else value for name, value in given.items()})
    assert message in str(caught.value)
    assert "hush" not in str(caught.value)


def test_the_password_comes_from_a_file_or_the_environment_and_is_never_shown(monkeypatch, tmp_path):
    file = tmp_path / "password"
    file.write_text("hush\n")
    options = {"store_url": "redis://h", "store_user": "u"}
    settings = load_settings(ManagerSettings, {**options, "store_password_file": str(file)})
    assert (settings.store_access.user, settings.store_access.password) == ("u", "hush")
    monkeypatch.setenv("SCISSORHANDS_MANAGER_STORE_PASSWORD", "hush")
    settings = load_settings(ManagerSettings, options)
    assert settings.store_access.password == "hush"
    assert "hush" not in f"{settings!r} {settings.store_access!r}"
    # An embedded store asks for none.
    assert load_settings(ManagerSettings).store_access.password == ""


@pytest.mark.parametrize("policy", ["lru", "h2o:paper", ""])
def test_an_unknown_default_policy_is_refused(policy):
    with pytest.raises(ConfigurationError, match="policy"):
        load_settings(ManagerSettings, {"policy": policy})


def test_every_setting_is_an_option_with_a_description():
    options = {option.name: option for option in manager.params}
    assert set(options) == {"config", *ManagerSettings.model_fields}
    for name in ManagerSettings.model_fields:
        assert ManagerSettings.model_fields[name].description in options[name].help
        assert variable(ManagerSettings, name) in options[name].help


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "port (--port or SCISSORHANDS_MANAGER_PORT)"),
        (["--store-url", "ftp://x"], "redis://"),
        (["--log-level", "loud"], "log_level"),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
        (["--host", "198.51.100.1", "--port", "0", "--metrics-port", "0"], "198.51.100.1"),
    ],
)
def test_the_command_says_what_is_wrong_and_exits(arguments, message):
    result = CliRunner().invoke(manager, arguments)
    assert result.exit_code != 0
    assert message in result.output
    assert "Traceback" not in result.output
