from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint import load_drafter, load_fusion, read_temperatures, save_drafter
from tests.unit.training.tiny import tiny_config, tiny_tables, write_tiny_data
from training.calibrate import calibrate
from training.dataset import DataError, SequenceData, draft_vocabulary
from training.evaluate import HeldOut
from training.progress import CURVE_FILE, PICTURE_FILE
from training.train import Run, TrainOptions, load_state, restore_trainee, schedule, train
from training.trainee import measure_feature_size

OPTIONS = TrainOptions(steps=4, sequences=2, anchors=6, learning_rate=1e-2, held_out_anchors=8)


def make_run(folder: Path, options: TrainOptions) -> Run:
    data = SequenceData(folder, held_out=4)
    ids, _ = draft_vocabulary(data.token_counts(), 32, (2,))
    return Run(data, tiny_tables(), tiny_config(), ids, measure_feature_size(data), options)


def test_a_resumed_run_is_exactly_the_uninterrupted_one(tmp_path: Path) -> None:
    data = write_tiny_data(tmp_path / "data")
    straight = make_run(data, OPTIONS)
    for _ in range(4):
        straight.advance()

    first = make_run(data, OPTIONS)
    first.advance()
    first.advance()
    first.save(tmp_path / "run")
    second = make_run(data, replace(OPTIONS, seed=99))  # whatever the new process starts with
    second.restore(load_state(tmp_path / "run"))
    second.advance()
    second.advance()

    assert second.step == 4
    expected = straight.trainee.state_dict()
    for name, value in second.trainee.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    data = write_tiny_data(tmp_path / "data")
    make_run(data, OPTIONS).save(tmp_path / "run")
    state = load_state(tmp_path / "run")
    state["config"]["block_size"] = 3
    with pytest.raises(DataError, match="block_size"):
        make_run(data, OPTIONS).restore(state)
    with pytest.raises(DataError, match="does not exist"):
        load_state(tmp_path / "elsewhere")


def test_training_learns_a_text_that_can_be_learnt(tmp_path: Path) -> None:
    data = write_tiny_data(tmp_path / "data", sequences=100)
    steps = replace(OPTIONS, steps=150, sequences=8, anchors=16, learning_rate=3e-2, evaluate_every=75)
    run = make_run(data, steps)
    train(run, tmp_path / "run", tiny_tables().head)
    early, late = run.points
    assert late.loss < early.loss
    assert min(late.acceptance[0], late.agreement[0]) > 0.5  # the draft vocabulary holds 32 of 48 tokens
    assert (tmp_path / "run" / CURVE_FILE).read_text().count("\n") == 3
    assert (tmp_path / "run" / PICTURE_FILE).stat().st_size > 1000

    # What is served (folded, bf16) is as good as what was trained, and its confidences can be calibrated.
    trainee = restore_trainee(load_state(tmp_path / "run"), tiny_tables())
    held_out = HeldOut(run.data, tiny_tables().head, 8, 4)
    score = held_out.score(trainee)
    save_drafter(tmp_path / "drafter", trainee.folded_fusion(), trainee.drafter)
    served = restore_trainee(load_state(tmp_path / "run"), tiny_tables())
    served.drafter = load_drafter(tmp_path / "drafter", tiny_tables().embedding, tiny_tables().head)
    served.fusion = load_fusion(tmp_path / "drafter")
    served.feature_size.fill_(1.0)
    assert held_out.score(served).acceptance == pytest.approx(score.acceptance, abs=0.02)

    report = calibrate(run.data, tiny_tables(), tmp_path / "drafter", candidates=8, seed=0)
    assert "mean ECE" in report
    temperatures = read_temperatures(tmp_path / "drafter")
    assert len(temperatures) == 4 and all(value > 0 for value in temperatures)


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    assert schedule(0.02, 0.04) == pytest.approx(0.5)
    assert schedule(0.04, 0.04) == pytest.approx(1.0)
    assert schedule(1.0, 0.04) == pytest.approx(0.0)
    with pytest.raises(ValueError, match="exactly one"):
        TrainOptions(minutes=1.0, steps=2)
    with pytest.raises(ValueError, match="anchors"):
        TrainOptions(steps=2, anchors=0)


def test_draft_vocabulary_takes_the_most_frequent_and_what_it_must() -> None:
    counts = torch.tensor([0, 5, 0, 9, 1, 9])
    ids, covered = draft_vocabulary(counts, 3, always=(2,))
    assert ids.tolist() == [2, 3, 5]
    assert covered == pytest.approx(18 / 24)


def test_shards_may_appear_while_training_and_held_out_text_is_never_trained_on(tmp_path: Path) -> None:
    folder = write_tiny_data(tmp_path, sequences=6)
    data = SequenceData(folder, held_out=4)
    assert data.scan() == 2
    write_tiny_data(folder, sequences=3, shard=1)
    assert data.scan() == 5
    assert not set(data.held_out_rows()) & set(data.training_rows())
    assert data.load(data.training_rows()).tokens.shape[0] == 5


def test_data_that_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"meta\.json"):
        SequenceData(tmp_path)
    folder = write_tiny_data(tmp_path, sequences=6)
    with pytest.raises(DataError, match="6 sequences, 7"):
        SequenceData(folder, held_out=7)
    meta = folder / "meta.json"
    meta.write_text(meta.read_text().replace('"hidden_size": 16', '"hidden_size": 8'))
    with pytest.raises(DataError, match="features has shape"):
        SequenceData(folder, held_out=4)


def test_a_sequence_without_an_answer_is_left_out(tmp_path: Path) -> None:
    folder = write_tiny_data(tmp_path, sequences=8)
    path = folder / "shard-00000.safetensors"
    columns = load_file(path)
    columns["mask"][1] = 0
    columns["mask"][6] = 0
    columns["mask"][6, 9] = 1
    save_file(columns, path)
    data = SequenceData(folder, held_out=4)
    assert [row.index for row in data.held_out_rows()] == [0, 2, 3]
    assert [row.index for row in data.training_rows()] == [4, 5, 7]
