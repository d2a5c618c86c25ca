"""What a store's URL may say, and what is told of one that says something else."""

import pytest

from scissorhands_server.store.address import Access, Kind, StoreAddress


@pytest.mark.parametrize(
    ("url", "shown", "told"),
    [
        ("redis://h", "redis://h:6379/0", {"kind": Kind.SERVER, "nodes": (("h", 6379),), "tls": False}),
        ("rediss://h:1/2", "rediss://h:1/2", {"nodes": (("h", 1),), "database": 2, "tls": True}),
        ("redis://u:p%40@[::1]:7/", "redis://[::1]:7/0", {"nodes": (("::1", 7),), "user": "u", "password": "p@"}),
        ("redis://:p@h", "redis://h:6379/0", {"user": "", "password": "p"}),
        ("unix:///run/r.sock", "unix:///run/r.sock", {"kind": Kind.SOCKET, "path": "/run/r.sock"}),
        ("unix://u:p@/r?db=3", "unix:///r", {"path": "/r", "database": 3, "user": "u", "password": "p"}),
        (
            "redis+sentinel://u:p@a,b:1/name/4",
            "redis+sentinel://a:26379,b:1/name/4",
            {"kind": Kind.SENTINEL, "nodes": (("a", 26379), ("b", 1)), "master": "name", "database": 4, "user": "u"},
        ),
        (
            "rediss+cluster://:p@a,b:1/0",
            "rediss+cluster://a:6379,b:1",
            {"kind": Kind.CLUSTER, "nodes": (("a", 6379), ("b", 1)), "tls": True, "password": "p"},
        ),
    ],
)
def test_a_url_is_taken_apart_and_shown_without_its_password(url, shown, told):
    address = StoreAddress.parse(url)
    assert {name: getattr(address, name) for name in told} == told
    assert str(address) == shown
    assert "p@" not in repr(address)
    assert StoreAddress.parse(str(address)).nodes == address.nodes


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://hush@h", "must begin with redis://"),
        ("redis:/hush", "must begin with"),
        ("redis://", "name a host"),
        ("redis://:hush@", "name a host"),
        ("redis://h:hush", "a host or a port"),
        ("redis://h:70000", "a host or a port"),
        ("redis://h:0", "from 1 to 65535"),
        ("redis://h/hush", "by a number"),
        ("redis://h/-1", "by a number"),
        ("redis://h,i", "redis+cluster://"),
        ("redis://h?password=hush", "after '?'"),
        ("redis://h#hush", "after '?'"),
        ("unix://hush/r", "absolute path"),
        ("unix://", "absolute path"),
        ("unix:///r?x=hush", "db=NUMBER"),
        ("unix:///r?db=hush", "by a number"),
        ("redis+sentinel://a,b", "/mymaster"),
        ("redis+sentinel://a/m/hush", "by a number"),
        ("redis+cluster://a,,b", "name a host"),
        ("redis+cluster://a/1", "none but 0"),
        ("redis+elsewhere://hush", "must begin with"),
    ],
)
def test_what_is_wrong_with_a_url_is_told_without_quoting_it(url, message):
    with pytest.raises(ValueError, match=r".+") as caught:
        StoreAddress.parse(url)
    assert message in str(caught.value)
    assert "hush" not in str(caught.value)


def test_files_that_cannot_be_used_are_named(tmp_path):
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    for name, access in (("ca_file", Access(ca_file=nonsense)), ("certificate", Access(certificate=nonsense))):
        with pytest.raises(ValueError, match=f"{name}: .*nonsense.pem"):
            access.check()
    with pytest.raises(ValueError, match=r"ca_file: .*No such file"):
        Access(ca_file=tmp_path / "none.pem").check()
    assert "hush" not in repr(Access(password="hush"))
