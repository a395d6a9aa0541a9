"""Records of the policy and `keep=` of saved networks.

A file of parameters, net.params, has its record beside it, in net.params.json; the parameters
themselves are MXNet's file. A symbol has its record in an attribute of a variable.
"""
import dataclasses
import json
import os
from contextlib import suppress
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple, Union

from ._mxnet import mx
from .checks import listed
from .files import must_exist, replace_file, replace_text, sha256
from .graph.graph import Graph
from .policy import POLICIES, Policy
from .version import __version__

ATTRIBUTE = "__mixed_precision__"  # of a symbol; MXNet ignores attributes of this form


@dataclasses.dataclass(frozen=True)
class Record:
    """How a saved network computes.

    Attributes:
        policies: the policy of each converted network in the saved one, by its path; "" is the
            saved network itself.
        keep: what stays float32: paths of blocks, such as ".output", and of nodes, such as
            ".output/fwd".
        nodes: the names of the float32 nodes of its symbol, if it was saved with one.
        operators: operators of which all nodes stay float32, of a network without a symbol.
    """
    policies: Dict[str, Policy]
    keep: Tuple[str, ...] = ()
    nodes: Optional[Tuple[str, ...]] = None
    operators: Tuple[str, ...] = ()

    def policy_at(self, path: str) -> Optional[Policy]:
        """Returns the policy by which the block at a path computes; None for float32."""
        policy = self.given_at(path)
        kept = any(_within(path, kept) for kept in self.keep if "/" not in kept)
        return None if policy is None or policy.is_float32 or kept else policy

    def given_at(self, path: str) -> Optional[Policy]:
        """Returns the policy that the block at a path, or one around it, was converted to."""
        around = [at for at in self.policies if _within(path, at)]
        return self.policies[max(around, key=len)] if around else None

    def text(self) -> str:
        """Returns its description for messages."""
        names = listed([policy.name for policy in dict.fromkeys(self.policies.values())])
        keep = [repr(name) for name in self.keep or self.nodes or ()]
        keep += [f"gluon_amp.ops({name!r})" for name in self.operators]
        return f"policy {names}, keep=[{listed(keep)}]"

    def to_json(self, **others: Any) -> str:
        """Returns its JSON, with further values."""
        facts = {"gluon_amp": __version__, **others, "keep": list(self.keep), "policies": {
            path: _policy_facts(policy) for path, policy in self.policies.items()}}
        if self.nodes is not None:
            facts["nodes"] = list(self.nodes)
        if self.operators:
            facts["operators"] = list(self.operators)
        return json.dumps(facts, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, source: str) -> "Record":
        """Parses JSON; `source` names it in errors."""
        try:
            facts = json.loads(text)
            policies = {path: _policy_of(policy) for path, policy in facts["policies"].items()}
            keep, nodes, operators = (facts["keep"], facts.get("nodes"),
                                      facts.get("operators", []))
            for names in (keep, nodes or [], operators):
                if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
                    raise TypeError(f"{names!r:.100} are no names")
        except _NoPolicy as error:
            raise ValueError(f"{source}: {error}. Convert the float32 network by another "
                             "policy, and delete the record") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{source} is no record of a policy, of gluon_amp {__version__} or "
                             f"older: {error!r:.200}") from None
        return cls(policies, tuple(keep), None if nodes is None else tuple(nodes),
                   tuple(operators))


def _within(path: str, around: str) -> bool:
    return path == around or path.startswith(f"{around}.")


def _policy_facts(policy: Policy) -> Union[str, Dict[str, Any]]:
    if POLICIES.get(policy.name) == policy:
        return policy.name
    return {field.name: getattr(policy, field.name) if field.name == "name" else
            getattr(policy, field.name).name for field in dataclasses.fields(policy)}


class _NoPolicy(ValueError):
    """A record has a policy that this version lacks."""


def _policy_of(facts: Any) -> Policy:
    name = facts if isinstance(facts, str) else facts["name"]
    roles = {field.name for field in dataclasses.fields(Policy)}
    if isinstance(facts, str) and facts in POLICIES:
        return POLICIES[facts]
    if isinstance(facts, str) or facts.keys() != roles:
        raise _NoPolicy(f"its policy {name!r} does not exist. Valid: {', '.join(POLICIES)}, or a "
                        f"Policy with {', '.join(sorted(roles))}")
    return Policy(**facts)


# ---- beside parameters

def record_path(params: str) -> str:
    """Returns the path of the record of a file of parameters; a symbolic link's is its target's."""
    return f"{os.path.realpath(params)}.json"


def save(params: str, write: Callable[[str], None], record: Optional[Record]) -> None:
    """Replaces a file of parameters and its record, each atomically.

    The record comes first, with the checksums of the new and of the former file: so a process that
    is killed between both leaves a file with a record.

    Args:
        params: the path of the file.
        write: writes the parameters to a path.
        record: the record; None removes an older one.
    """
    def write_both(path: str) -> None:
        write(path)
        if record is not None and os.path.isfile(path):
            former = []
            with suppress(ValueError):  # of a damaged record
                former = [sha256(params)] if read_record(params) == record else []
            replace_text(record_path(params), record.to_json(
                sha256=[sha256(path), *former]) + "\n")

    replace_file(params, write_both)
    if record is None and _has_record(params):
        os.remove(record_path(params))


def save_arrays(params: str, arrays: Mapping[str, Any], record: Record) -> None:
    """Replaces a file of arrays of `mx.nd` or `mx.np`, and its record."""
    classic = {name: array.as_nd_ndarray() for name, array in arrays.items()}
    save(params, lambda path: mx.nd.save(path, classic), record)


def _has_record(params: str) -> bool:
    path = record_path(params)
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(12) == b'{"gluon_amp"'


def read_record(params: str) -> Optional[Record]:
    """Returns the record of a file of parameters; None if it has none.

    Raises:
        ValueError: the record is damaged, or it is of another file.
    """
    path = record_path(params)
    if not os.path.isfile(params) or not _has_record(params):
        return None
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    record, checksums = Record.from_json(text, path), json.loads(text).get("sha256")
    if not isinstance(checksums, list) or sha256(params) not in checksums:
        raise ValueError(f"{path} has the policy and keep= of another {os.path.basename(params)}: "
                         "its checksum differs. Copy both files together, or delete "
                         f"{os.path.basename(path)}, which says nothing of this file")
    return record


def record_like(like: object, policy: object, keep: object) -> Tuple[str, Record]:
    """Returns the path that `like=` is, without policy and `keep=` beside it, and the record of
    this file of parameters."""
    if not isinstance(like, (str, os.PathLike)):
        raise TypeError("like takes the path of a file of parameters, or False. Received: "
                        f"{like!r}")
    if policy is not None or keep != ():
        raise ValueError(f"like={str(like)!r} has the policy and keep=. Valid: like alone, or "
                         f"policy and keep=. Received: policy={policy!r}, keep={keep!r}")
    params = os.fspath(like)
    must_exist(params)
    record = read_record(params)
    if record is None:
        raise ValueError(f"like={params!r} needs the record of its policy, {record_path(params)}, "
                         "which does not exist. Converted networks write it beside their "
                         "parameters: copy both files, or pass policy and keep=")
    return params, record


def refuse_others(record: Record, source: str, others: Sequence[str], unkept: Sequence[str],
                  convert: str) -> None:
    """Raises ValueError for a network with other policies than a record's, or with 16-bit parts
    that it keeps in float32. Float32 parameters may be used by any policy.

    Args:
        source: the file that has the record, or "the symbol ...".
        others: the names of the other policies.
        unkept: the names of these parts.
        convert: the call that converts.
    """
    is_float32 = all(policy.is_float32 for policy in record.policies.values())
    if (others or unkept) and not is_float32:
        here = f"policy {listed(others)}" if others else "the same policy"
        like = "FILE), with the file of its parameters" if source.startswith("the symbol") \
            else f"{source!r})"
        raise ValueError(
            f"{source} records {record.text()}. This network has {here}"
            f"{f', and does not keep {listed(unkept)}' if unkept else ''}. Valid: gluon_amp."
            f"{convert}, like={like}, or the same policy and keep=. To compute otherwise on "
            f"purpose: gluon_amp.{convert}, ..., like=False)")


# ---- in symbols

def put_record(graph: Graph, record: Record) -> None:
    """Sets the record of a graph: an attribute of its first variable."""
    variables = [node for node in graph.nodes() if node.is_variable]
    for node in variables:
        node.attrs.pop(ATTRIBUTE, None)
    for node in variables[:1]:
        node.attrs[ATTRIBUTE] = record.to_json()


def record_in(symbol: "mx.sym.Symbol") -> Optional[Record]:
    """Returns the record that a symbol has; None if it has none."""
    texts = [attrs[ATTRIBUTE] for attrs in symbol.attr_dict().values() if ATTRIBUTE in attrs]
    return Record.from_json(texts[0], f"the symbol's attribute {ATTRIBUTE}") if texts else None
