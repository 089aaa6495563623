"""Decoding a dump of any form and version."""

import copy
import json
import pickle
from typing import Any

import pytest

from benchmarks.dump_files import Call, Comm, Job, as_json, dump, steps
from lockstep.watch.dumps.decode import BLOCK, DumpDecoder
from lockstep.watch.dumps.dump_parser import user_call_site
from lockstep.watch.dumps.reader_process import pack_trace, unpack_trace
from lockstep.watch.dumps.traces import CommunicatorTrace, PendingEntry, RankTrace

WORLD = Comm("0", (0, 1, 2), "default_pg")


def stopped(backend: str = "nccl", calls: int = 30) -> Job:
    """Rank 2 does not enter the last collective."""
    job = steps(3, [WORLD, Comm("1", (0, 1), "tp")], calls)
    job.programs[2] = job.programs[2][:10]
    job.backend = backend
    return job.play()


def read(content: Any) -> RankTrace:
    return DumpDecoder().read(content if isinstance(content, bytes) else pickle.dumps(content, 2))


def numbers(trace: RankTrace) -> list[tuple[Any, ...]]:
    """The content that must be equal for all forms of a dump."""
    return [
        (g.name, g.description, g.backend, g.members, g.entered, g.completed, g.entered_at, g.certain, g.uncertain,
         list(g.sequence), list(g.signature), list(g.created))
        for g in trace.groups
    ]  # fmt: skip


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_pickle_and_json_give_the_same_content(backend: str) -> None:
    job = stopped(backend)
    content = dump(job, 0)
    first, second = read(content), read(as_json(content))
    assert numbers(first) == numbers(second) and first.complete and second.complete
    world, pair = first.groups
    assert (world.entered, world.completed, world.first) == (11, 10, 1)
    assert (pair.entered, pair.completed, pair.members) == (10, 10, "" if backend == "gloo" else "[0, 1]")
    assert world.certain == 10
    assert world.entered_at == job.entries[0][-1].created / 1e9
    assert [first.sites[at] for at in world.site][:2] == [
        "train.py:100 in training_step",
        "train.py:101 in training_step",
    ]
    assert set(second.groups[0].site) == {0}, "JSON dumps have no stacks"


def older(content: dict[str, Any], version: str) -> dict[str, Any]:
    """A dump without the fields that its older version lacks."""
    made = copy.deepcopy(content) | {"version": version}
    for entry in made["entries"]:
        for key in ("thread_name", "thread_id"):
            del entry[key]
        if version in ("2.1", "1.5", "1.0"):
            for key in ("is_p2p", "input_dtypes", "output_dtypes", "timeout_ms"):
                del entry[key]
        if version in ("1.5", "1.0"):
            entry["seq_id"] = entry.pop("collective_seq_id")
            del entry["p2p_seq_id"], entry["op_id"]
            entry["process_group"] = entry["process_group"][0]
    made["nccl_version"] = made.pop("comm_lib_version")
    if version in ("2.1", "1.5", "1.0"):
        del made["pg_status"]
    if version == "1.0":
        del made["pg_config"]
    return made


@pytest.mark.parametrize("version", ["2.9", "2.3", "2.1", "1.5", "1.0"])
def test_every_version_gives_the_same_counts(version: str) -> None:
    content = dump(stopped(), 0)
    trace = read(older(content, version))
    assert trace.version == version and not trace.notes
    new = read(content)
    assert [(g.name, g.entered, g.completed, list(g.sequence), list(g.site)) for g in trace.groups] == [
        (g.name, g.entered, g.completed, list(g.sequence), list(g.site)) for g in new.groups
    ]


def test_a_bare_list_of_entries_is_a_dump() -> None:
    trace = read(older(dump(stopped(), 0), "1.0")["entries"])
    assert [(g.name, g.entered, g.completed) for g in trace.groups] == [("0", 11, 10), ("1", 10, 10)]


def test_a_group_without_a_name_is_named_by_its_number() -> None:
    content = older(dump(stopped(), 0), "1.5")
    for entry in content["entries"]:
        del entry["process_group"]
    assert [g.name for g in read(content).groups if g.sequence] == ["0", "1"]


def test_counters_give_the_progress_if_only_active_entries_are_dumped() -> None:
    job = stopped()
    trace = read(dump(job, 0, only_active=True))
    world, pair = (next(g for g in trace.groups if g.name == name) for name in "01")
    assert (world.entered, world.completed, len(world.sequence)) == (11, 10, 1) and not trace.complete
    assert (pair.entered, pair.completed, len(pair.sequence)) == (10, 10, 0), "from pg_status: the only one left"
    absent = read(dump(job, 2, only_active=True))
    assert [(g.entered, g.completed) for g in absent.groups] == [(10, 10)] and absent.entries == 0


def test_a_wrapped_ring_keeps_sequence_numbers() -> None:
    trace = read(dump(stopped(calls=30), 0, ring=5))
    assert not trace.complete and trace.began != trace.began
    assert [(g.entered, g.first) for g in trace.groups] == [(11, 9), (10, 9)]


def test_older_calls_become_digests_of_whole_blocks() -> None:
    """Digests are equal for equal calls, whatever part of them the ring holds, and differ if any call does."""
    job = steps(3, [WORLD], 1000).play()
    long, short = read(dump(job, 0)).groups[0], read(dump(job, 1, ring=600)).groups[0]
    assert (long.digested, len(long.digests), long.sequence[0]) == (1, 6, 7 * BLOCK)
    assert (short.digested, len(short.digests), short.sequence[0]) == (4, 3, 7 * BLOCK)
    assert list(long.digests[3:]) == list(short.digests)
    changed = dump(job, 0)
    changed["entries"][500]["input_sizes"] = [[1]]
    other = read(changed).groups[0]
    assert [a == b for a, b in zip(long.digests, other.digests, strict=True)] == [True, True, False, True, True, True]
    everything = DumpDecoder().read(pickle.dumps(changed, 2), full=True).groups[0]
    assert not everything.digests and list(everything.sequence) == list(range(1, 1001))
    assert (everything.entered, everything.completed) == (other.entered, other.completed) == (1000, 1000)


def test_missing_entries_prove_absence_only_in_a_complete_dump() -> None:
    job = Job([WORLD, Comm("9", (0, 1, 2), "never")], [[Call(0)] * 8] * 3).play()
    assert {g.name: g.entered for g in read(dump(job, 0)).groups} == {"0": 8, "9": 0}
    content = dump(job, 0, ring=4)
    assert {g.name: g.entered for g in read(content).groups} == {"0": 8, "9": 0}, "pg_status has no number for it"
    assert {g.name: g.entered for g in read(content | {"pg_status": None}).groups} == {"0": 8, "9": -1}


def signatures(*entries: dict[str, Any]) -> list[int]:
    """The signatures of calls, each on its own communicator."""
    base = dump(Job([WORLD], [[Call(0)]] * 3).play(), 0)
    made = [base["entries"][0] | {"process_group": (str(at), "x")} | entry for at, entry in enumerate(entries)]
    return [group.signature[0] for group in read(base | {"entries": made, "pg_config": {}, "pg_status": {}}).groups]


def call(name: str, ins: list[list[int]], outs: list[list[int]], dtype: str = "Float") -> dict[str, Any]:
    return {"profiling_name": name, "input_sizes": ins, "output_sizes": outs,
            "input_dtypes": [dtype] * len(ins), "output_dtypes": [dtype] * len(outs)}  # fmt: skip


def test_matching_calls_have_one_signature() -> None:
    a, b = signatures(call("nccl:gather", [[3]], []), call("nccl:gather", [[3]], [[3], [3]]))
    assert a == b, "only the root has outputs"
    a, b = signatures(call("nccl:scatter", [], [[3]]), call("nccl:scatter", [[3], [3]], [[3]]))
    assert a == b, "only the root has inputs"
    a, b = signatures(call("nccl:all_to_all", [[3]], [[9]]), call("nccl:all_to_all", [[4]], [[1]]))
    assert a == b, "everybody sends what it likes"
    a, b = signatures(call("nccl:all_gather", [[3]], [[3], [5]]), call("nccl:all_gather", [[5]], [[3], [5]]))
    assert a == b, "uneven, and known to all"


def test_calls_that_do_not_match_have_different_signatures() -> None:
    base = call("nccl:all_reduce", [[4, 2]], [[4, 2]])
    made = signatures(
        base, call("nccl:all_reduce", [[8]], [[8]]), call("nccl:all_reduce", [[4, 2]], [[4, 2]], "BFloat16"),
        call("nccl:broadcast", [[4, 2]], [[4, 2]]), call("nccl:barrier", [], []),
        call("nccl:reduce_scatter", [[8]], [[4]]), call("nccl:reduce_scatter", [[16]], [[4]]),
    )  # fmt: skip
    assert len(set(made)) == len(made)


def test_a_coalesced_block_is_one_call() -> None:
    entries = dump(Job([WORLD], [[Call(0)] * 4] * 3).play(), 0)["entries"]
    for entry, sequence in zip(entries, (1, 2, 2, 2), strict=True):
        entry["collective_seq_id"] = sequence
    entries[3]["profiling_name"] = "nccl:ALLGATHER_coalesced"
    entries[1]["state"] = entries[2]["state"] = "scheduled"
    decoder = DumpDecoder()
    (group,) = decoder.read(pickle.dumps({"version": "2.7", "entries": entries}, 2)).groups
    assert (list(group.sequence), group.entered, group.completed) == ([1, 2], 2, 2)
    assert decoder.calls[group.signature[1]][0] == "ALLGATHER_coalesced"


def test_point_to_point_is_no_collective() -> None:
    content = dump(stopped(), 1)
    recv = content["entries"][-1] | {"profiling_name": "nccl:recv 1<-0", "is_p2p": True, "state": "started",
                                     "collective_seq_id": 11, "p2p_seq_id": 2}  # fmt: skip
    done = recv | {"profiling_name": "nccl:send 1->0", "state": "completed", "p2p_seq_id": 1}
    trace = read(content | {"entries": [*content["entries"], done, recv]})
    world = trace.groups[0]
    assert (world.entered, len(world.sequence)) == (11, 11)
    assert world.transfers == [PendingEntry(recv["record_id"], recv["time_created_ns"] / 1e9, True, ("recv 1<-0",))]


def test_unreadable_entries_are_counted_and_the_rest_is_read() -> None:
    content = dump(stopped(), 0)
    content["entries"][3:3] = [None, 7, {}, {"profiling_name": 3}, content["entries"][3] | {"collective_seq_id": 2**70}]
    content["entries"][0] = content["entries"][0] | {"input_sizes": "?"}
    trace = read(content)
    assert trace.notes == ["5 entries cannot be read"] and trace.groups[0].entered == 11


@pytest.mark.parametrize("form", ["text", "texts", "tuple"])
def test_stacks_may_be_text(form: str) -> None:
    content = dump(stopped(), 0)
    text = "#0 all_reduce from /x/site-packages/torch/distributed/c10d.py:2696\n#1 step from /home/u/job.py:15\n"
    for entry in content["entries"]:
        entry["frames"] = {"text": text, "texts": text.splitlines(), "tuple": tuple(entry["frames"])}[form]
    trace = read(content)
    expected = "train.py:100 in training_step" if form == "tuple" else "job.py:15 in step"
    assert trace.sites[trace.groups[0].site[0]] == expected


def test_the_call_site_is_a_line_of_the_user() -> None:
    torch, hf = "/v/lib/python3.11/site-packages/torch/distributed/x.py", "/v/lib/python3.11/site-packages/trl/grpo.py"
    assert user_call_site([(torch, 1, "f"), (hf, 2, "g"), ("/home/u/train.py", 3, "main")]) == "train.py:3 in main"
    assert user_call_site([(torch, 1, "f"), (hf, 2, "g")]) == "grpo.py:2 in g"
    assert user_call_site([(torch, 1, "f")]) == "x.py:1 in f"
    assert user_call_site([]) == ""


def test_a_trace_survives_packing_and_unpacking() -> None:
    trace = read(dump(stopped(), 0))
    about, blob = pack_trace(trace)
    back = unpack_trace(json.loads(json.dumps(about)), blob)
    assert repr(back) == repr(trace)  # NaN is not equal to itself


def test_gloo_with_unrecorded_calls_has_uncertain_counts() -> None:
    content = dump(stopped("gloo"), 0)
    assert not any(g.uncertain for g in read(content).groups)
    content["pg_status"]["0"]["last_enqueued_collective"] += 1
    assert [g.uncertain for g in read(content).groups] == [True, False], "a send, a receive or a monitored barrier"
    assert isinstance(read(content).groups[0], CommunicatorTrace)


@pytest.mark.parametrize(
    "key",
    [0, None, (1, 2), "9" * 5000, "\u00b2", "-1"],
    ids=["int", "none", "tuple", "long", "superscript", "negative"],
)
def test_counters_under_a_key_that_is_no_number_are_ignored(key: Any) -> None:
    content = dump(stopped(), 0) | {"pg_status": {key: {"last_enqueued_collective": 99}}}
    assert repr(read(content)) == repr(read(content | {"pg_status": {"x": None}}))


def test_members_are_a_list_or_text_and_bounded() -> None:
    content = dump(stopped(), 0)

    def members(ranks: object) -> tuple[str, int]:
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
        trace = read(content | {"pg_config": config})
        return trace.groups[0].members, trace.world

    assert members([0, 1, 2]) == members("[0, 1, 2]") == ("[0, 1, 2]", 3)
    for odd in ("", "[]", "all", [0, "1"], [{}], None, 7, "[0, 9999999]", "[" + "1, " * 2**20 + "1]"):
        assert members(odd) == ("", 0)
    assert read(content | {"pg_config": {"": {"ranks": "[0, 1, 2, 3]"}}}).world == 4


def test_names_are_bounded() -> None:
    content = dump(stopped(), 0)
    for number, entry in enumerate(content["entries"]):
        entry["process_group"] = ("x" * 10_000 + str(number), "y" * 10_000)
    assert {len(group.name) for group in read(content).groups if group.sequence} == {300}
