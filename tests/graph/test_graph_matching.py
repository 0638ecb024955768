"""Matching by name: stand-ins for parts, objects that are built later, aliases, cycles, and their reports."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import pickle
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import holdfast as hf
from holdfast import graph


class Library(NamedTuple):
    make: Callable[[Any], Any]  # makes an array that can be changed in place
    read: Callable[[Any], Any]


LIBRARIES = {
    "torch": Library(lambda value: torch.tensor(value, dtype=torch.float32), lambda x: x.tolist()),
    "nnx": Library(lambda value: nnx.Param(jnp.asarray(value, jnp.float32)), lambda x: np.asarray(x[...]).tolist()),
    "numpy": Library(lambda value: np.array(value, np.float32), lambda x: x.tolist()),
}


@pytest.fixture(params=list(LIBRARIES))
def library(request: pytest.FixtureRequest) -> Library:
    return LIBRARIES[request.param]


@pytest.fixture
def path(place: str, library: Library) -> str:
    """A checkpoint of a net with one layer, beside a step."""
    layer = graph.Node(kernel=library.make([[1.0, 2.0]]), bias=library.make([3.0, 4.0]))
    return graph.Checkpoint(net=graph.Node(l1=layer), step=5).save(f"{place}/ckpt")


def test_stand_ins_for_the_parents_lead_to_values_now_and_later(path: str, library: Library) -> None:
    layer = graph.Node(bias=library.make([0.0, 0.0]))
    checkpoint = graph.Checkpoint(net=graph.Node(l1=layer))
    status = checkpoint.restore(path)
    assert library.read(layer.bias) == [3, 4]
    status.assert_existing_objects_matched().assert_nontrivial_match()
    with pytest.raises(AssertionError, match="net/l1/kernel"):
        status.assert_consumed()
    assert set(status.report.pending) == {"step", "net/l1/kernel"}

    layer.extra = graph.Node()
    for _ in range(2):  # what does not fit is not attached
        with pytest.raises(hf.TreeMismatchError, match="net/l1/kernel"):
            layer.kernel = library.make([0.0, 0.0])
    assert vars(layer).keys() == {"bias", "extra"}
    layer.kernel = library.make([[0.0, 0.0]])
    assert library.read(layer.kernel) == [[1, 2]]
    checkpoint.step = 0
    assert checkpoint.step == 5
    status.assert_consumed()
    layer.kernel = library.make([[9.0, 9.0]])  # only the object that is attached first is restored
    assert library.read(layer.kernel) == [[9, 9]]


def test_a_subtree_is_attached_when_all_of_it_fits(path: str, library: Library) -> None:
    late = graph.Checkpoint(net=graph.Untracked("mine"))
    status = late.restore(path, partial=True)
    part = graph.Node(l1=graph.Node(bias=library.make([0.0, 0.0]), kernel=library.make([0.0])))
    with pytest.raises(hf.TreeMismatchError, match="net/l1/kernel"):
        late.net = part
    assert late.net == "mine"
    assert library.read(part.l1.bias) == [0, 0]
    assert late.unsaved() == {}
    part.l1.kernel = library.make([[0.0, 0.0]])
    assert library.read(part.l1.kernel) == [[0, 0]]
    late.net, late.step = part, 0
    assert (library.read(part.l1.bias), library.read(part.l1.kernel)) == ([3, 4], [[1, 2]])
    status.assert_consumed()


def test_what_does_not_fit_is_not_added(place: str) -> None:
    saved = graph.Checkpoint(listed=[np.ones(1), np.ones(1)], mapped={"a": np.ones(1), "b": np.ones(1)})
    path = saved.write(f"{place}/x")
    checkpoint = graph.Checkpoint(listed=graph.TrackedList([np.zeros(1)]), mapped=graph.TrackedDict())
    status = checkpoint.read(path)
    listed, mapped, misfit = checkpoint.listed, checkpoint.mapped, np.zeros(3)
    changes: tuple[Callable[[], Any], ...] = (
        lambda: listed.append(misfit),
        lambda: listed.insert(1, misfit),
        lambda: listed.extend([misfit]),
        lambda: listed.__setitem__(slice(1, None), [misfit]),
        lambda: mapped.__setitem__("a", misfit),
        lambda: mapped.update(b=misfit),
        lambda: mapped.setdefault("b", misfit),
    )
    for change in changes:
        with pytest.raises(hf.TreeMismatchError, match=r"expected .*3.*found .*1"):
            change()
        assert (len(listed), mapped) == (1, {})
    listed.append(np.zeros(1))
    mapped.update(a=np.zeros(1), b=np.zeros(1))
    status.assert_consumed()


def test_one_object_under_several_names_is_saved_once(place: str, library: Library) -> None:
    save = graph.Checkpoint()
    save.listed = [library.make(1.0)]
    save.listed.append(library.make(2.0))
    save.mapped = {"one": save.listed[0]}
    save.mapped["two"] = save.listed[1]
    path = save.save(f"{place}/tf_list_example")
    assert [leaf.path for leaf in hf.describe(path)] == ["listed/0", "listed/1", "save_counter"]

    restore = graph.Checkpoint()
    v2 = library.make(0.0)
    restore.mapped = {"two": v2}
    restore.restore(path)
    assert library.read(v2) == 2
    restore.listed = []
    restore.listed.append(library.make(0.0))
    assert library.read(restore.listed[0]) == 1
    restore.listed.append(v2)
    assert library.read(v2) == 2


@pytest.mark.parametrize("first", [1, 2])
def test_the_latest_restore_wins(place: str, library: Library, first: int) -> None:
    paths = {number: graph.Checkpoint(v=library.make(11.0 + number)).save(f"{place}/run") for number in (1, 2)}
    roots = {1: graph.Checkpoint(), 2: graph.Checkpoint()}
    for number in (first, 3 - first):
        roots[number].restore(paths[number])
    leaf = library.make(0.0)
    roots[1].v = leaf
    assert library.read(leaf) == 12
    roots[2].v = leaf
    assert library.read(leaf) == (13 if first == 1 else 12)


def test_two_objects_for_one_saved_object_are_a_conflict(place: str, library: Library) -> None:
    shared = graph.Node(v=library.make(1.0))
    path = graph.Checkpoint(a=shared, b=shared).save(f"{place}/ckpt")
    status = graph.Checkpoint(a=graph.Node(v=library.make(0.0)), b=graph.Node(v=library.make(0.0))).restore(path)
    assert status.report.conflicts == (("a", "a", "b"),)
    for check in (status.assert_consumed, status.assert_existing_objects_matched):
        with pytest.raises(AssertionError, match="a and b"):
            check()


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda number: {"w": jnp.full(2, number)}, "/w"),
        (lambda number: {"w": number}, "/w"),
        (lambda number: {"inner": [{"w": number}]}, "/inner"),
        (lambda number: [number + 0.5, 1.5], ""),
    ],
    ids=["arrays of jax", "numbers", "nested", "list"],
)
def test_one_container_takes_the_values_of_the_first_of_two_saved_ones(
    make: Callable[[int], Any], path: str, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A target network is often the parameters themselves at first, and a copy of them later."""
    graph.Checkpoint(params=make(7), target=make(3)).write(f"{place}/checkpoint")
    one = make(0)
    graph.Checkpoint(params=one, target=one).restore(f"{place}/checkpoint")
    assert str(one) == str(make(7))
    assert f"params{path} and target{path} are one object, but two in the checkpoint" in caplog.text


def test_asserts_fail_without_a_checkpoint_and_where_only_the_root_matches(place: str) -> None:
    status = graph.Checkpoint(v=np.zeros(1)).restore(None)
    for check in (status.assert_consumed, status.assert_existing_objects_matched, status.assert_nontrivial_match):
        with pytest.raises(AssertionError, match="no checkpoint"):
            check()
    assert status.expect_partial().report.checkpoint == ""

    path = graph.Checkpoint(v1=np.ones(1)).save(f"{place}/ckpt")
    other = graph.Checkpoint(net=graph.Node(v1=np.zeros(1)))
    with pytest.raises(hf.TreeMismatchError, match="net/v1"):
        other.restore(path)
    assert other.save_counter == 0
    for checkpoint, message in ((other, "use different names"), (graph.Checkpoint(), "nothing has been attached")):
        with pytest.raises(AssertionError, match=message):
            checkpoint.restore(path, partial=True).assert_nontrivial_match()


def test_the_report_is_data(place: str, library: Library) -> None:
    make = library.make
    path = graph.Checkpoint(a=make(1.0), b=make(1.0), c=make(1.0), empty={}).write(f"{place}/ckpt")
    checkpoint = graph.Checkpoint(a=make(0.0), c=graph.Node(x=1), d=make(0.0), empty=[], more=(), none={})
    report = checkpoint.restore(path).report
    assert library.read(checkpoint.a) == 1
    assert (report.restored, report.missing, report.pending, report.unused) == (("a",), ("d", "c/x"), ("b",), ("c",))
    assert report.checkpoint == path
    assert not report.complete
    assert "(1): b" in str(report)
    with pytest.raises(AssertionError, match=r"without a place in the program.*c"):
        graph.Checkpoint(c=graph.Node(x=1), a=make(0.0), b=make(0.0)).restore(path).assert_consumed()

    leaf = make(0.0)  # one object, which takes the first of two saved ones
    graph.Checkpoint(a=leaf, b=leaf, c=make(0.0), more=[]).restore(path).assert_consumed()
    assert library.read(leaf) == 1


def test_expect_partial_silences_the_warning_about_unused_values(place: str, caplog: pytest.LogCaptureFixture) -> None:
    path = graph.Checkpoint(v1=np.ones(1), v2=np.ones(1)).save(f"{place}/ckpt")
    for partial in (False, True):
        gc.collect()  # of other tests
        caplog.clear()
        checkpoint = graph.Checkpoint(v2=np.zeros(1))
        status = checkpoint.restore(path)
        if partial:
            status.expect_partial()
        del checkpoint, status
        gc.collect()
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert ["v1" in warning and "v2" not in warning for warning in warnings] == ([] if partial else [True])


def test_a_root_shares_its_names_with_the_checkpoint(place: str) -> None:
    m = graph.Node(w=np.ones(1))
    with pytest.raises(hf.errors.OptionError, match="w="):
        graph.Checkpoint(root=m, w=np.zeros(1))
    with pytest.raises(hf.errors.OptionError, match="'save'"):  # a method
        graph.Checkpoint(save=1)
    assert graph.Node(save=1).save == 1
    for root in (np.ones(3), torch.optim.SGD([torch.ones(1)], 0.1), (1, 2)):
        with pytest.raises(hf.errors.OptionError, match="name"):
            graph.Checkpoint(root)

    named = graph.Checkpoint(m.__class__(), w=m.w).save(f"{place}/named")
    owner = graph.Node(w=np.zeros(1))
    graph.Checkpoint(owner).restore(named).assert_consumed()
    assert owner.w.tolist() == [1]

    assert graph.Checkpoint(root=m, w=m.w).w is m.w
    owned = graph.Checkpoint(m).save(f"{place}/owned")
    checkpoint = graph.Checkpoint(w=np.zeros(1))
    checkpoint.restore(owned).assert_consumed()
    assert checkpoint.w.tolist() == [1]


def test_modules_nodes_and_weak_references_are_roots(place: str) -> None:
    path = graph.Checkpoint(torch.nn.Linear(2, 3), step=7).save(f"{place}/module")
    assert [leaf.path for leaf in hf.describe(path)] == ["weight", "bias", "step", "save_counter"]
    checkpoint = graph.Checkpoint(torch.nn.Linear(2, 3), step=0)
    checkpoint.restore(path).assert_consumed()
    assert checkpoint.step == 7

    path = graph.Checkpoint(graph.Node(w=np.ones(1), v=np.ones(2))).save(f"{place}/node")
    root = graph.Node(w=np.zeros(1))
    graph.Checkpoint(root).restore(path)
    root.v = np.zeros(2)  # which is attached later
    assert root.v.tolist() == [1, 1]

    checkpoint, watch = graph.Checkpoint(weakref.ref(root)), weakref.ref(root)
    assert graph.load_checkpoint(checkpoint.save(f"{place}/weak")).has_tensor("w")
    del root
    gc.collect()
    assert watch() is None


def test_a_save_does_not_lose_values_that_wait_and_a_later_restore_takes_them_over(place: str) -> None:
    path = graph.Checkpoint(a=np.ones(1), b=np.ones(1)).save(f"{place}/ckpt")
    checkpoint = graph.Checkpoint(a=np.zeros(1))
    status = checkpoint.restore(path)
    with pytest.raises(hf.errors.StateError, match=r"waiting.*b"):
        checkpoint.save(f"{place}/ckpt")
    assert checkpoint.save_counter == 1
    status.expect_partial()
    assert checkpoint.save(f"{place}/ckpt") == f"{place}/ckpt-2"

    checkpoint = graph.Checkpoint(a=np.zeros(1))
    checkpoint.restore(path)
    checkpoint.b = np.zeros(1)
    checkpoint.restore(path).assert_consumed()
    checkpoint.save(f"{place}/ckpt")

    checkpoint = graph.Checkpoint()  # each restore waits for a part of its own
    for part in "ab":
        checkpoint.restore(path, select=part, partial=True)
    checkpoint.a, checkpoint.b = np.zeros(1), np.zeros(1)
    assert checkpoint.a == checkpoint.b == 1


def test_copies_share_nothing(place: str) -> None:
    checkpoint = graph.Checkpoint(graph.Node(w=np.ones(1)), listed=[np.ones(1)])
    checkpoint.save(f"{place}/ckpt")
    copied = copy.deepcopy(checkpoint)
    assert copied.save_counter == 1
    copied.listed[0][...] = 5
    assert checkpoint.listed[0].tolist() == [1]
    assert copied.save(f"{place}/copy") == f"{place}/copy-2"


def test_tracked_containers_and_nodes_are_ordinary_otherwise() -> None:
    listed, mapped = graph.TrackedList([2, 1]), graph.TrackedDict({"a": 1, 3: 2})
    for container, kind, values in ((listed, list, [2, 1]), (mapped, dict, [1, 2])):
        again = pickle.loads(pickle.dumps(container))
        assert (type(again), again, jax.tree.leaves(container)) == (kind, container, values)
    mapped |= {"b": 4}
    assert (mapped.setdefault("a", 7), mapped.setdefault("c", 5)) == (1, 5)
    node = graph.Node(mapped=mapped, lock=graph.Untracked(1))
    del node.lock
    node.lock = 2
    assert (repr(node), list(graph.Checkpoint(node).unsaved())) == ("Node(mapped, lock)", [])


def test_what_cannot_be_saved_is_named(place: str) -> None:
    with pytest.raises(hf.errors.UnsupportedLeafError, match=r"net/it: .*list_iterator"):
        graph.Checkpoint(net=graph.Node(it=iter([1]))).save(f"{place}/ckpt")
    checkpoint = graph.Checkpoint(w=1, it=graph.Untracked(iter([1])))
    checkpoint.save(f"{place}/ckpt")
    assert next(checkpoint.it) == 1
    with pytest.raises(hf.errors.UnsupportedLeafError, match="w"):
        graph.Checkpoint(w=np.array([object()])).save(f"{place}/ckpt")
    mine: list[Any] = []  # which changes behind the checkpoint
    checkpoint = graph.Checkpoint()
    checkpoint.restore(graph.Checkpoint(listed=[np.ones(1)]).save(f"{place}/listed"), partial=True)
    checkpoint.listed = mine
    mine.append(np.zeros(1))
    with pytest.raises(hf.errors.UnsupportedLeafError, match="listed"):
        checkpoint.save(f"{place}/ckpt")


def test_select_exclude_and_rename(place: str) -> None:
    saved = graph.Checkpoint(net=graph.Node(a=np.ones(2), b=np.ones(3)), step=1).save(f"{place}/ckpt")
    checkpoint = graph.Checkpoint(net=graph.Node(a=np.zeros(2), b=np.zeros(3)), step=0)
    checkpoint.restore(saved, select="net/*", exclude=["**/b"]).assert_consumed()
    assert (checkpoint.net.a.tolist(), checkpoint.net.b.tolist(), checkpoint.step) == ([1, 1], [0, 0, 0], 0)
    renamed = graph.Checkpoint(model=graph.Node(x=np.zeros(2), b=np.zeros(3)), epoch=0)
    renamed.restore(saved, rename={"net": "model", "net/a": "model/x", "step": "epoch"}).assert_consumed()
    assert (renamed.model.x.tolist(), renamed.epoch) == ([1, 1], 1)
    wrong: list[tuple[type[Exception], str, Any]] = [
        (hf.errors.OptionError, "5 must be a path, or a path and a function of the array", {"net.a": 5}),
        (hf.errors.OptionError, "is not an array", {"net": ("model", np.transpose)}),
        (hf.TreeMismatchError, "no net/c", {"net.c": "model.c"}),
        (hf.TreeMismatchError, "already", {"net.a": "net.b"}),
        (hf.TreeMismatchError, "net/b/c/d is below a value", {"net.a": "net.b.c.d"}),
    ]
    for error, message, rename in wrong:
        with pytest.raises(error, match=message):
            renamed.restore(saved, rename=rename)
    with pytest.raises(hf.TreeMismatchError, match="matches no leaf"):
        renamed.restore(saved, select="nat/**")


def test_what_a_function_of_rename_raises_names_the_path(place: str) -> None:
    path = graph.Checkpoint(a=np.ones(2), n=np.float32(2)).write(f"{place}/x")
    checkpoint = graph.Checkpoint(b=np.zeros(2), n=np.float32(0))
    with pytest.raises(ZeroDivisionError) as error:
        checkpoint.read(path, rename={"a": ("b", lambda array: 1 / 0)})
    assert error.value.__notes__ == ["raised by the function of rename= for b"]
    with pytest.raises(hf.TreeMismatchError, match="b: the function of rename= did not return an array"):
        checkpoint.read(path, rename={"a": ("b", lambda array: None)})
    assert not checkpoint.b.any()
    checkpoint.read(path, rename={"a": ("b", lambda array: array + 1), "n": ("n", lambda array: array * np.float32(2))})
    assert (checkpoint.b.tolist(), checkpoint.n) == ([2, 2], 4)


def test_plain_contents_of_lists_and_dicts(place: str) -> None:
    best = ("loss", [0.5, {7: None, "7": b"x", True: {1, 2}}])
    history: list[Any] = [0.5, 0.25, {"a": [1, 2]}]
    saved = graph.Checkpoint(history=history, metrics={"loss": [1.0], 3: "three"}, best=best, none=[])
    path = saved.save(f"{place}/ckpt")
    longer = [9.0] * 5
    checkpoint = graph.Checkpoint(history=longer, metrics={"loss": [], "new": 7}, best=None, none=[1, 2])
    status = checkpoint.restore(path)
    assert checkpoint.history is longer == [0.5, 0.25, {"a": [1, 2]}]
    assert checkpoint.metrics == {"loss": [1.0], "new": 7, 3: "three"}
    assert (checkpoint.best, checkpoint.none) == (best, [])
    assert (status.report.missing, status.report.pending) == (("metrics/new",), ())
    checkpoint.history.append(1.0)
    status.try_complete()
    assert len(checkpoint.history) == 4
    empty = graph.Checkpoint()
    status = empty.restore(path)
    empty.metrics, empty.history = {}, []
    assert (empty.metrics, empty.history) == (saved.metrics, saved.history)
    empty.best, empty.none = None, []
    status.assert_consumed()


def test_empty_contents_as_deep_as_values_can_be(place: str) -> None:
    for depth in (198, 199, 200, 201, 400):
        deep = functools.reduce(lambda inner, _: [inner], range(depth), list[Any]())
        path = graph.Checkpoint(deep=deep, n=1).write(f"{place}/{depth}")
        assert hf.load(path)["n"] == 1
        if depth == 198:
            checkpoint = graph.Checkpoint(deep=[], n=0)
            checkpoint.read(path).assert_consumed()
            assert checkpoint.deep == deep


PAIR = (1, (2, "x"))
RENAMED = {"rename": {"d": "e", "d/x": "e/y", "d/3": "e/z", "d/l/0": "e/l/first"}, "partial": True}
# What was saved, what the program has, and the options; what is there then, and what waits.
# An entry that is no longer a list waits for objects.
WAITING: dict[str, tuple[tuple[Any, Any, Any], tuple[Any, Any]]] = {
    "renamed": (
        ({"d": {"x": 1, 3: {5: []}, "l": [1, 2]}}, {"e": {}}, RENAMED),
        ({"e": {"y": 1, "z": {5: []}}}, ("e/l/1", "e/l/first")),
    ),
    "with arrays": (
        ({"m": [1, np.ones(1)], "d": {"a": np.ones(1), "c": 1}}, {"m": [], "d": {}}, {}),
        ({"m": [], "d": {"c": 1}}, ("m/0", "m/1", "d/a")),
    ),
    "not chosen": (
        ({"h": [1, 2, 3], "d": {"a": 1}}, {"h": [7], "d": {}}, {"exclude": ["h/2", "d/a"]}),
        ({"h": [7], "d": {}}, ("h/0", "h/1")),
    ),
    "equal tuples are no alias": (
        ({"p": PAIR, "h": [PAIR, PAIR]}, {"p": None, "h": []}, {}),
        ({"p": PAIR, "h": [PAIR, PAIR]}, ()),
    ),
}


@pytest.mark.parametrize("case", WAITING)
def test_contents_and_those_that_wait(case: str, place: str) -> None:
    (saved, live, options), (found, pending) = WAITING[case]
    path = graph.Checkpoint(**saved).write(place)
    checkpoint = graph.Checkpoint(**copy.deepcopy(live))
    status = checkpoint.read(path, **options).expect_partial()
    assert vars(checkpoint) == found
    assert status.report.pending == pending


def test_restores_that_follow_each_other_do_not_pile_up(place: str, caplog: pytest.LogCaptureFixture) -> None:
    saved = graph.Checkpoint(a=np.ones(1), b=np.ones(1))
    gc.collect()  # of other tests
    caplog.clear()
    holder = graph.Node(a=np.zeros(1))
    checkpoint = graph.Checkpoint(holder)
    for _ in range(3):
        saved.b += 1
        status = checkpoint.restore(saved.save(f"{place}/run"))
    assert len(checkpoint._holdfast.restorations) == len(holder._holdfast_pending) == 1
    holder.b = np.zeros(1)
    assert holder.b.tolist() == [4]
    status.assert_consumed()
    del checkpoint, status
    gc.collect()
    assert "before all values" not in caplog.text


class Kept(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["moment"] = parameter.grad.clone()


class Lion(Kept):
    """An optimizer of a program, which keeps a moment."""


class Lynx(Lion):
    """Derives from another, whose state it takes."""


class Tiger(Kept):
    """Keeps the same for another rule."""


def test_what_an_optimizer_of_a_program_keeps_is_not_for_another(place: str) -> None:
    def state(kind: Any) -> dict[str, Any]:
        net = torch.nn.Linear(2, 1)
        return {"net": net, "optimizer": kind(net.parameters())}

    with hf.CheckpointCallback(place) as checkpoint:
        trained, _ = checkpoint.restore_or_initialize(state(Lion))
        trained["net"](torch.ones(1, 2)).sum().backward()
        trained["optimizer"].step()
        checkpoint.on_step(1, trained)
    refused = pytest.raises(hf.TreeMismatchError, match="optimizer/slots/net/weight/moment: in the checkpoint")
    with hf.CheckpointCallback(place) as checkpoint, refused:
        checkpoint.restore_or_initialize(state(Tiger))
    options: dict[str, Any] = {"partial": "initialize"}
    for kind, partial, slots in ((Lynx, {}, 2), (Tiger, options, 0)):
        fresh = state(kind)
        with hf.CheckpointCallback(place, **partial) as checkpoint:
            checkpoint.restore_or_initialize(fresh)
        assert torch.equal(fresh["net"].weight, trained["net"].weight)
        assert len(fresh["optimizer"].state) == slots
