"""Folders of text: one stream of tokens in a mapped file, windows of it without bias."""

import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

import torch
from data_files import WORDS, global_batch, refused, text_folder, word_tokeniser, workload_for

from gsreal.data import sources as data
from gsreal.data import text
from gsreal.data.text import Windows, tokeniser
from gssim.workload import TextFolder

GPT = {"kind": "tokens", "vocabulary": 256, "maximum_sequence_length": 128}
BERT = {"kind": "tokens", "vocabulary": 257, "maximum_sequence_length": 128, "task": "masked-token"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder, documents = text_folder(tmp_path_factory.mktemp("web") / "text")
    return folder, documents, folder.parent / "cache"


def table(corpus, **changes):
    return {"kind": "text-folder", "folder": str(corpus[0]), "cache": str(corpus[2])} | changes


def stream(corpus, **changes):
    named = TextFolder(**table(corpus, **changes))
    return text.token_stream(named, tokeniser(named.tokenizer))


def test_the_stream_is_all_documents_by_path_with_an_end_after_each(corpus):
    tokens = stream(corpus)
    assert isinstance(tokens, np.memmap)
    assert tokens.dtype == np.uint8
    assert tokens.tobytes() == b"".join(document + b"\x04" for document in corpus[1])


def test_long_files_are_read_in_pieces_that_end_with_a_line(tmp_path, corpus, monkeypatch):
    whole = stream(corpus).tobytes()
    monkeypatch.setattr(text, "PIECE_BYTES", 50)
    assert stream((corpus[0], None, tmp_path)).tobytes() == whole


def test_the_file_of_tokens_is_made_once_and_again_when_a_text_changes(tmp_path, capsys):
    folder, _ = text_folder(tmp_path / "text")
    ours = (folder, None, tmp_path / "cache")
    first = stream(ours)
    assert "makes tokens of 5 files" in capsys.readouterr().err
    assert np.array_equal(stream(ours), first)
    assert capsys.readouterr().err == ""
    (folder / "a.txt").write_text("something else")
    assert stream(ours).tobytes().startswith(b"something else\x04")
    assert len(list((tmp_path / "cache").iterdir())) == 2  # nothing unfinished is left
    (folder / "a.txt").write_text("marked, and not of JSON", encoding="utf-8-sig")
    (folder / "a.txt").rename(folder / "a.jsonl.txt")
    assert stream(ours).tobytes().startswith(b"marked, and not of JSON\x04")


def test_a_tokeniser_reads_words_and_its_mask_is_used(tmp_path, corpus):
    pytest.importorskip("tokenizers")
    file = str(word_tokeniser(tmp_path / "tokenizer.json"))
    tokens = stream(corpus, tokenizer=file)
    words = [5 + WORDS.index(word) for document in corpus[1] for word in [*document.decode().split(), WORDS[0]]]
    ends = np.cumsum([len(document.split()) + 1 for document in corpus[1]]) - 1
    expected = np.array(words)
    expected[ends] = 3  # [SEP]
    assert np.array_equal(tokens, expected)
    model = BERT | {"vocabulary": 5 + len(WORDS)}
    inputs, targets = global_batch(workload_for(model, table(corpus, tokenizer=file)), seed=0, step=0)
    assert ((inputs == 4) == (targets != data.IGNORED)).all()


def test_windows_are_the_same_for_every_division_and_lie_in_the_text(corpus):
    whole = b"".join(document + b"\x04" for document in corpus[1])
    for model in (GPT, BERT):
        workload = workload_for(model, table(corpus))
        inputs, targets = global_batch(workload, seed=0, step=7)
        source = data.open_source(workload)
        rows = [slice(0, 2), slice(2, 2), slice(2, 8)]
        parts = [source.batch(seed=0, step=7, rows=each) for each in rows]
        assert torch.equal(torch.cat([part for part, _ in parts]), inputs)
        assert torch.equal(torch.cat([part for _, part in parts]), targets)
        assert source.loss_terms(seed=0, step=7, rows=rows) == [data.loss_terms(part) for _, part in parts]
        text_of = inputs if model is GPT else torch.where(targets == data.IGNORED, inputs, targets)
        assert all(bytes(row) in whole for row in text_of.tolist())
        if model is GPT:
            assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_every_start_is_as_likely_as_any_other():
    source = Windows(np.arange(14, dtype=np.uint8), length=4, batch_size=1000, mask=None)
    starts = np.concatenate([source.batch(seed=0, step=s, rows=slice(0, 1000))[0][:, 0].numpy() for s in range(10)])
    counts = np.bincount(starts)
    assert len(counts) == 10  # windows of 5 tokens in 14
    assert np.abs(counts - 1000).max() < 150  # five standard deviations


def test_faults_are_said_in_one_line(tmp_path, corpus):
    def made(name, content, folder="made"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_bytes(content)
        return workload_for(GPT, table((tmp_path / folder, None, tmp_path / "cache")))

    assert "no such folder" in refused(workload_for(GPT, table((tmp_path / "nowhere", None, tmp_path))))
    assert "holds no files of text" in refused(made("a.md", b"text", "other"))
    assert "hold no text" in refused(made("a.txt", b""))
    assert "holds 7 tokens, workload.sequence_length = 24 needs more" in refused(made("a.txt", b"little"))
    assert "line 2 is no JSON object with a field 'text'" in refused(made("b.jsonl", b'{"text": "x"}\n{"t": 1}\n'))
    assert "line 1 is no JSON object with a field 'text'" in refused(made("b.jsonl", b"[1]\n"))
    assert "line 1 is no JSON object with a field 'text'" in refused(made("b.jsonl", json.dumps({"text": 1}).encode()))
    assert "line 2 is not in UTF-8" in refused(made("b.jsonl", b'{"text": "x"}\n{"text": "\xe4"}\n'))
    made("b.jsonl", b"")
    for encoding in ("utf-16", "utf-32"):
        assert "a.txt: is in UTF-16 or UTF-32; allowed: UTF-8" in refused(made("a.txt", "text".encode(encoding)))
    made("a.txt", b"")
    assert "c.txt.gz: cannot be read: " in refused(made("c.txt.gz", b"no gzip"))
    assert "needs a vocabulary of 256, the model's is 255" in refused(
        workload_for(GPT | {"vocabulary": 255}, table(corpus))
    )
    assert "needs a vocabulary of 257, the model's is 256" in refused(
        workload_for(BERT | {"vocabulary": 256}, table(corpus))
    )
    assert not any(path.name.startswith("unfinished") for path in (tmp_path / "cache").iterdir())


def test_a_folder_for_tokens_that_cannot_be_written_is_said(tmp_path, corpus):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(workload_for(GPT, table(corpus, cache=str(tmp_path / "file" / "x"))))
