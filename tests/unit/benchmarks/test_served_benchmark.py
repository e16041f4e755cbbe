"""The parts of the benchmark that need no running system: figures, pairs, tables, recordings, one stream."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks import served
from benchmarks.prompts import CHAT, CODE, MATH, PROMPTS
from benchmarks.readme import BEGIN, END, with_measured
from benchmarks.recording import Recorded, RecordingError, load_recording, write_recording
from benchmarks.runs import GENERATE, SERVED, Answer, Run, differing_texts, from_csv, run_of, to_csv
from benchmarks.streams import chat_body, run_streams
from benchmarks.summary import checks, label_of, pairs_of, report, rows_of, table
from benchmarks.system import System
from engine.drafters.replay import read_recording
from engine.noise import extend_digest
from loadtest.stream import StreamError, StreamTimes

CONDITIONS = {"machine": "a processor, 2 cores", "date": "2030-01-01"}


def answer(start: float, first: float, last: float, tokens: int, accepted: int = 0, text: str = "x") -> Answer:
    return Answer(StreamTimes(start, first, last, tokens, accepted, rejected=1), last + 0.5, text)


def run(drafter: str, speculation: bool, streams: int, pair: int, speed: float, user: float) -> Run:
    return Run(SERVED, drafter, speculation, streams, pair, 2, 200, 200 / speed, speed, user, 0.25)


def generated(streams: int, speed: float) -> Run:
    return Run(GENERATE, "", False, streams, 0, 2, 200, 200 / speed, speed, speed / streams, 0.5)


# ---------------------------------------------------------------- figures


def test_the_figures_of_a_run() -> None:
    answers = [answer(0.0, 1.0, 3.0, 21, accepted=8), answer(0.5, 1.0, 6.0, 21, accepted=2), answer(0.0, 2.0, 4.5, 11)]
    made = run_of(answers, system=SERVED, streams=3, pair=1, drafter="shipped", speculation=True, differing=1)
    assert (made.requests, made.tokens, made.accepted, made.rejected) == (3, 53, 10, 3)
    assert made.seconds == 6.5  # from the first request to the end of the last answer
    assert made.tokens_per_s == pytest.approx(53 / 6.5)
    assert made.tokens_per_s_per_user == 4.0  # of 10, 4 and 4
    assert made.first_token_s == 1.0  # of 1, 0.5 and 2
    assert made.accepted_per_step == pytest.approx(10 / (20 + 20 + 10 - 10))  # first tokens come out of the prompts
    assert (made.drafter, made.speculation, made.pair, made.differing) == ("shipped", True, 1, 1)


def test_a_run_that_accepts_every_token_of_a_block() -> None:
    """65 tokens: one from the prompt, then 8 steps of 7 accepted tokens and one more."""
    made = run_of([answer(0.0, 1.0, 2.0, 65, accepted=56)], system=SERVED, streams=1)
    assert made.accepted_per_step == 7.0


@pytest.mark.parametrize(
    "answers", [[], [answer(0.0, 1.0, 1.0, 1)], [Answer(StreamTimes(0.0, None, None, 0), 1.0, "")]]
)
def test_no_figures_without_a_rate(answers: list[Answer]) -> None:
    with pytest.raises(ValueError, match="answers"):
        run_of(answers, system=SERVED, streams=1)


def test_texts_are_compared_request_by_request() -> None:
    ours = [answer(0, 1, 2, 9, text=text) for text in "abc"]
    theirs = [answer(0, 1, 2, 9, text=text) for text in "acb"]
    assert differing_texts(ours, theirs) == 2
    assert differing_texts(ours, ours) == 0
    with pytest.raises(ValueError):
        differing_texts(ours, theirs[:2])


# ---------------------------------------------------------------- pairs and tables

RUNS = [
    generated(1, 20.0),
    run("shipped", True, 1, 0, 44.0, 48.0),
    run("shipped", False, 1, 0, 40.0, 40.0),
    run("shipped", True, 1, 1, 30.0, 33.0),
    run("shipped", False, 1, 1, 20.0, 22.0),  # the machine was slow: both runs of this pair were
    run("shipped", True, 1, 2, 52.0, 55.0),
    run("shipped", False, 1, 2, 40.0, 44.0),
    run("REPLAY 0.85", True, 1, 0, 100.0, 120.0),
    run("REPLAY 0.85", False, 1, 0, 40.0, 40.0),
    run("shipped", True, 4, 0, 99.0, 30.0),
]


def test_pairs_are_the_two_runs_side_by_side() -> None:
    pairs = pairs_of(RUNS)
    assert [(fast.tokens_per_s, plain.tokens_per_s) for fast, plain in pairs] == [
        (44, 40),
        (30, 20),
        (52, 40),
        (100, 40),
    ]
    assert all(fast.drafter == plain.drafter and fast.speculation and not plain.speculation for fast, plain in pairs)


def test_rows_hold_medians_and_the_range_of_ratios() -> None:
    rows = {(row.streams, row.system): row for row in rows_of(RUNS)}
    assert list(rows) == [
        (1, "transformers generate"),
        (1, "speculation, shipped drafter"),
        (1, "plain, beside shipped"),
        (1, "speculation, REPLAY 0.85 drafter"),
        (1, "plain, beside REPLAY 0.85"),
        (4, "speculation, shipped drafter"),
    ]
    fast, plain = rows[1, "speculation, shipped drafter"], rows[1, "plain, beside shipped"]
    assert (fast.tokens_per_s, plain.tokens_per_s) == (44.0, 40.0)
    assert fast.total is not None and fast.user is not None
    # The median of the pairs' ratios, not the ratio of the medians.
    assert (fast.total.median, fast.total.least, fast.total.most) == pytest.approx((1.3, 1.1, 1.5))
    assert (fast.user.median, fast.user.least, fast.user.most) == pytest.approx((1.25, 1.2, 1.5))
    assert (plain.total, plain.user, plain.accepted_per_step) == (None, None, None)
    assert fast.over_generate == pytest.approx(2.2)
    alone = rows[4, "speculation, shipped drafter"]
    assert (alone.total, alone.over_generate) == (None, None)  # no plain run beside it, no generate at 4 streams


def test_the_table_is_markdown_of_one_width() -> None:
    lines = table(rows_of(RUNS)).splitlines()
    assert len(lines) == 2 + 6
    assert len({len(line) for line in lines}) == 1
    assert {line.count("|") for line in lines} == {10}
    assert "1.30 (1.10 to 1.50)" in lines[3]


def test_every_line_of_a_replay_drafter_says_so() -> None:
    replayed = [r for r in RUNS if r.drafter.startswith("REPLAY")]
    assert all("REPLAY" in label_of(r) for r in replayed)
    assert all("REPLAY" in line for line in table(rows_of(replayed)).splitlines()[2:])
    assert all("REPLAY" in line for line in checks(replayed))
    assert all("REPLAY" in line for line in to_csv(replayed, {}).splitlines()[1:])


def test_the_report_counts_what_differs() -> None:
    left = Run(SERVED, "REPLAY 0.9", True, 1, 0, 6, 60, 1.0, 60.0, 60.0, 0.1, differing=1, unrecorded=2)
    text = report([left], CONDITIONS)
    assert "* machine: a processor, 2 cores" in text
    assert "1 of 6 answers with speculation differ" in text
    assert "2 of 6 left the recording" in text


def test_runs_come_back_from_csv() -> None:
    made = run_of([answer(0.0, 0.25, 2.25, 33, 16)], system=SERVED, streams=1, drafter="REPLAY 0.85", speculation=True)
    runs, conditions = from_csv(to_csv([*RUNS, made], CONDITIONS | {"odd": "a: b\nc"}))
    assert runs[-1] == made
    assert table(rows_of(runs)) == table(rows_of([*RUNS, made]))
    assert conditions == CONDITIONS | {"odd": "a: b c"}


def test_a_csv_without_a_column_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens_per_s"):
        from_csv("system,drafter,speculation,streams,pair,requests,tokens,seconds\nserved,,0,1,0,1,9,1.0\n")


def test_the_readme_is_filled_between_its_marks() -> None:
    filled = with_measured(f"a\n{BEGIN}\nold\n{END}\nb\n", "new\n\n")
    assert filled == f"a\n{BEGIN}\nnew\n{END}\nb\n"
    assert with_measured(filled, "new") == filled
    with pytest.raises(ValueError, match="README"):
        with_measured(f"{END} {BEGIN}", "new")
    assert with_measured(served.README.read_text(), "x").count("x") >= 1  # the real one has the marks


def test_write_readme_takes_the_csv_and_draws_the_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "README", tmp_path / "README.md")
    served.README.write_text(f"before\n{BEGIN}\n{END}\n")
    (tmp_path / "runs.csv").write_text(to_csv(RUNS, CONDITIONS))
    plot = tmp_path / "deep" / "plot.png"
    assert served.main(["--write-readme", "--csv", str(tmp_path / "runs.csv"), "--plot", str(plot)]) == 0
    assert "speculation, REPLAY 0.85 drafter" in served.README.read_text()
    assert plot.read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- what is asked for


def test_prompts_are_mixed_and_enough() -> None:
    assert len(PROMPTS) == len(set(PROMPTS)) == 32
    for first in range(0, 27, 3):
        kinds = [kind for prompt in PROMPTS[first : first + 3] for kind in (MATH, CODE, CHAT) if prompt in kind]
        assert kinds == [MATH, CODE, CHAT]


@pytest.mark.parametrize(("streams", "requests"), [(1, 6), (2, 6), (4, 8), (6, 6), (16, 16), (32, 32)])
def test_a_run_has_whole_rounds_of_requests(streams: int, requests: int) -> None:
    assert served.requests_at(streams) == requests


@pytest.mark.parametrize(
    "arguments",
    [["--concurrency", "0"], ["--concurrency", "33"], ["--acceptance", "1"], ["--pairs", "0"], ["--only", "x"]],
)
def test_bad_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        served.command_line().parse_args(arguments)
    assert refused.value.code == 2
    assert arguments[0] in capsys.readouterr().err


# ---------------------------------------------------------------- recordings

PROMPT, OTHER = (1, 2, 3), (4,)


def test_a_recording_is_what_a_replay_drafter_reads(tmp_path: Path) -> None:
    path = tmp_path / "new" / "recording.json"
    # Two continuations of one prompt that part after a token.
    recorded = [Recorded(PROMPT, (7, 8, 9)), Recorded(PROMPT, (7, 5)), Recorded(OTHER, (6, 6)), Recorded(OTHER, (6, 6))]
    write_recording(path, recorded)
    assert load_recording(path, [PROMPT, OTHER], 2) == recorded[:3]
    replayed = read_recording(path)
    digest = extend_digest(0, PROMPT)
    assert list(replayed[extend_digest(digest, (7, 8))]) == [9]
    assert list(replayed[extend_digest(digest, (7, 5))]) == []
    assert list(replayed[extend_digest(0, (4, 6))]) == [6]
    assert extend_digest(digest, (9,)) not in replayed


def test_a_recording_that_lacks_something_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recording.json"
    with pytest.raises(RecordingError, match="no recording"):
        load_recording(path, [PROMPT], 2)
    write_recording(path, [Recorded(PROMPT, (7, 8))])
    with pytest.raises(RecordingError, match="lacks 1 of 2 prompts"):
        load_recording(path, [PROMPT, OTHER], 2)
    with pytest.raises(RecordingError, match="at 3 tokens"):
        load_recording(path, [PROMPT], 3)


# ---------------------------------------------------------------- streams


class Echo(BaseHTTPRequestHandler):
    """Answers a chat request with the words of its prompt, one event each; refuses an empty prompt."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        words = body["messages"][0]["content"].split()
        if not words:
            self.send_error(400)
            return
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        deltas = [{"role": "assistant", "content": ""}, *({"content": f"{word} "} for word in words), {}]
        for delta in deltas:
            self._event({"choices": [{"index": 0, "delta": delta}]})
        details = {"accepted_prediction_tokens": int(body["speculation"]), "rejected_prediction_tokens": 0}
        self._event({"choices": [], "usage": {"completion_tokens": len(words), "completion_tokens_details": details}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: object) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def echo() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_answers_come_back_in_the_order_of_their_requests(echo: str) -> None:
    texts = [f"answer number {i}" for i in range(7)]
    answers = run_streams(echo, [chat_body("m", text, 8, i % 2 == 0) for i, text in enumerate(texts)], 3)
    assert [a.text for a in answers] == [f"{text} " for text in texts]
    assert [a.times.accepted for a in answers] == [1, 0, 1, 0, 1, 0, 1]
    assert all(
        a.times.start < a.times.first <= a.times.last <= a.end for a in answers if a.times.first and a.times.last
    )
    assert all(a.times.tokens == 3 for a in answers)


def test_a_refused_request_ends_the_run(echo: str) -> None:
    with pytest.raises(StreamError, match="status 400"):
        run_streams(echo, [chat_body("m", "well", 8, True), chat_body("m", "", 8, True)], 2)


def test_the_command_goes_through_its_pairs_and_writes_what_it_says(
    echo: str, target_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything but Ray, in whose place the server above repeats the prompts."""

    @contextmanager
    def repeating(target: Path, drafting: dict[str, object]) -> Iterator[System]:
        yield System(echo, "any", compiled_kernels=True)

    monkeypatch.setattr(served, "running_system", repeating)
    csv, plot = tmp_path / "deep" / "served.csv", tmp_path / "served.png"
    options = ["--only", "shipped", "--skip-transformers", "--concurrency", "4", "1", "--pairs", "2", "--tokens", "8"]
    assert served.main([*options, "--csv", str(csv), "--plot", str(plot)]) == 0
    runs, conditions = from_csv(csv.read_text())
    # Pair after pair, in each the numbers of streams from the least, in each of them with speculation and plain.
    expected = [(pair, streams, yes) for pair in (0, 1) for streams in (1, 4) for yes in (True, False)]
    assert [(r.pair, r.streams, r.speculation) for r in runs] == expected
    assert [r.requests for r in runs] == [6, 6, 8, 8] * 2
    assert [r.accepted for r in runs] == [6, 0, 8, 0] * 2
    assert not any(r.differing for r in runs)
    assert conditions["CPU kernels"] == "compiled"
    assert plot.exists()
    said = capsys.readouterr().out
    assert "| speculation, shipped drafter |" in said
    assert "shipped: 0 of 28 answers with speculation differ" in said
    assert f"runs: {csv}" in said
