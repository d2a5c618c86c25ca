"""The reference of the gRPC services, from the comments of the protocol and the table of statuses."""

import inspect
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path, PurePosixPath

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

from reference_markdown import anchor, code, page, table, text
from scissorhands_server.status import STATUS_TABLE

PROTO = Path(__file__).resolve().parent.parent / "proto"
PACKAGE = ".scissorhands.v1."

_INTRODUCTION = """\
Package `scissorhands.v1`. Both servers also answer the standard health and reflection services. Every number that
stands for bytes, slots, tokens or seconds says so in its comment. In Python use `scissorhands_client`, which has typed
forms of all this."""

_STATUSES = """\
A call that fails ends with one of these codes. Its details hold a `google.rpc.ErrorInfo` with the domain `scissorhands`
and the reason below; INVALID_ARGUMENT also a `BadRequest` that names the field, and RESOURCE_EXHAUSTED and ABORTED a
`RetryInfo` where it is known when to try again. What a single method says with a code stands in its comment."""

# Places of the lists within the descriptors, as paths of source locations count them.
_SERVICE, _METHOD = 6, 2
_MESSAGE, _FIELD, _NESTED, _NESTED_ENUM = 4, 2, 3, 4
_ENUM, _VALUE = 5, 2

_Path = tuple[int, ...]
_Comments = dict[_Path, str]
_Kind = FieldDescriptorProto.Type
_Label = FieldDescriptorProto.Label


def api_pages() -> dict[str, str]:
    """Return the pages of the services and of each file's messages, by their names below ``docs/``."""
    described = _described()
    pages_of = {name: file for file in described for name in _names(file)}
    services = [part for file in described for part in _services(file, pages_of)]
    contents = ["## Messages", *(_contents(file) for file in described if file.message_type or file.enum_type)]
    pages = {"api.md": page("API", _INTRODUCTION, *services, *_statuses(), *contents)}
    for file in described:
        parts = list(_types(file, pages_of))
        if parts:
            pages[f"api/{_stem(file)}.md"] = page(f"API: {_stem(file)}", _comments(file).get((12,), ""), *parts)
    return pages


def _described() -> list[FileDescriptorProto]:
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    with tempfile.NamedTemporaryFile() as output:
        well_known = files("grpc_tools") / "_proto"
        words = [f"-I{PROTO}", f"-I{well_known}", "--include_source_info", f"--descriptor_set_out={output.name}"]
        if protoc.main(["protoc", *words, *sources]) != 0:
            raise RuntimeError("protoc refuses the protocol")
        return list(FileDescriptorSet.FromString(Path(output.name).read_bytes()).file)


def _stem(file: FileDescriptorProto) -> str:
    return PurePosixPath(file.name).stem


def _comments(file: FileDescriptorProto) -> _Comments:
    """Return the comment of everything in a file; that of the file itself stands before its syntax, at (12,)."""
    return {tuple(each.path): text(each.leading_comments) for each in file.source_code_info.location}


def _names(file: FileDescriptorProto) -> Iterator[str]:
    """Yield the names of what can be a field's type, without the package."""
    yield from (each.name for each in file.enum_type)
    for message in file.message_type:
        yield message.name
        nested = [each.name for each in message.nested_type if not each.options.map_entry]
        yield from (f"{message.name}.{name}" for name in (*nested, *(each.name for each in message.enum_type)))


def _link(full_name: str, pages_of: dict[str, FileDescriptorProto], folder: str) -> str:
    name = full_name.removeprefix(PACKAGE)
    if name not in pages_of:
        return code(full_name.removeprefix("."))
    return f"[{name}]({folder}{_stem(pages_of[name])}.md#{anchor(name)})"


def _contents(file: FileDescriptorProto) -> str:
    links = [f"[{name}](api/{_stem(file)}.md#{anchor(name)})" for name in _names(file)]
    return f"`{file.name}`: {', '.join(links)}."


def _services(file: FileDescriptorProto, pages_of: dict[str, FileDescriptorProto]) -> Iterator[str]:
    comments = _comments(file)
    for index, service in enumerate(file.service):
        yield f"## {service.name}"
        yield comments[_SERVICE, index]
        yield _methods(service, (_SERVICE, index), comments, pages_of)


def _methods(
    service: ServiceDescriptorProto, path: _Path, comments: _Comments, pages_of: dict[str, FileDescriptorProto]
) -> str:
    def signature(method: MethodDescriptorProto) -> list[str]:
        asked = _link(method.input_type, pages_of, "api/")
        given = _link(method.output_type, pages_of, "api/")
        return [
            f"stream of {asked}" if method.client_streaming else asked,
            f"stream of {given}" if method.server_streaming else given,
        ]

    rows = [
        [code(method.name), *signature(method), comments[*path, _METHOD, index]]
        for index, method in enumerate(service.method)
    ]
    return table(["Method", "Takes", "Returns", "Meaning"], rows)


def _statuses() -> Iterator[str]:
    yield "## Statuses"
    yield _STATUSES
    rows = [
        [code(row.code.name), code(row.reason), text((inspect.getdoc(error) or "").partition("\n\n")[0])]
        for error, row in STATUS_TABLE.items()
        if row.reason != "INTERNAL"
    ]
    rows.append(["`INTERNAL`", "`INTERNAL`", "Anything else; the server's log tells."])
    yield table(["Code", "Reason", "When"], rows)


def _types(file: FileDescriptorProto, pages_of: dict[str, FileDescriptorProto]) -> Iterator[str]:
    comments = _comments(file)
    for index, message in enumerate(file.message_type):
        yield from _message(message, message.name, (_MESSAGE, index), comments, pages_of)
    for index, enum in enumerate(file.enum_type):
        yield from _enum(enum, enum.name, (_ENUM, index), comments)


def _message(
    message: DescriptorProto, name: str, path: _Path, comments: _Comments, pages_of: dict[str, FileDescriptorProto]
) -> Iterator[str]:
    yield f"## {name}"
    yield comments[path]
    rows = [
        [str(field.number), code(field.name), _field_type(field, message, pages_of), comments[*path, _FIELD, index]]
        for index, field in enumerate(message.field)
    ]
    yield table(["No.", "Field", "Type", "Meaning"], rows) if rows else ""
    for index, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _message(nested, f"{name}.{nested.name}", (*path, _NESTED, index), comments, pages_of)
    for index, enum in enumerate(message.enum_type):
        yield from _enum(enum, f"{name}.{enum.name}", (*path, _NESTED_ENUM, index), comments)


def _enum(enum: EnumDescriptorProto, name: str, path: _Path, comments: _Comments) -> Iterator[str]:
    yield f"## {name}"
    yield comments[path]
    rows = [
        [str(value.number), code(value.name), comments[*path, _VALUE, index]] for index, value in enumerate(enum.value)
    ]
    yield table(["No.", "Value", "Meaning"], rows)


def _field_type(field: FieldDescriptorProto, message: DescriptorProto, pages_of: dict[str, FileDescriptorProto]) -> str:
    """Return a field's type, with how often it may be there and what it excludes."""
    scalar = _Kind.Name(field.type).removeprefix("TYPE_").lower()
    shown = _link(field.type_name, pages_of, "") if field.type_name else code(scalar)
    entry = next(
        (each for each in message.nested_type if field.type_name.endswith(f".{message.name}.{each.name}")), None
    )
    if entry is not None and entry.options.map_entry:
        key, value = (_field_type(each, entry, pages_of) for each in entry.field)
        return f"map from {key} to {value}"
    if field.label == _Label.LABEL_REPEATED:
        return f"repeated {shown}"
    if field.proto3_optional:
        return f"optional {shown}"
    if field.HasField("oneof_index"):
        return f"{shown}, one of {code(message.oneof_decl[field.oneof_index].name)}"
    return shown
