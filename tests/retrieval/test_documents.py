"""PDF, Word, HTML and LaTeX files in a folder of texts."""

import pytest

from dlm_rag.retrieval.text_folder import describe_text_folder, list_document_suffixes, read_text_passages

HTML = b"""<html><head><title>Novels</title><script>alert(1)</script></head><body><h1>Emma</h1>
<p>A novel by <b>Jane</b>
Austen.</p><!-- no --><h2>Dune</h2><div>By<p>Frank<br>Herbert.<table><tr><td>Of<td>1965<ul><li>a<li>b"""
TEX = r"""\documentclass{article}\title{Novels}\begin{document}\maketitle
\section{Emma}% a comment
A novel by \textbf{Jane Austen}.
\subsection[D]{\emph{Dune}} By Frank Hérbert.
\end{document}"""


def make_pdf(text):
    """The bytes of a PDF of one page with a line of text."""
    stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
    bodies = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
        b" /Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
    ]
    found = b"%PDF-1.4\n"
    places = []
    for number, body in enumerate(bodies, start=1):
        places.append(len(found))
        found += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return (
        found
        + b"xref\n0 5\n0000000000 65535 f \n%strailer\n<< /Size 5 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n"
        % (table, len(found))
    )


def read(folder, unread=None):
    unread = {} if unread is None else unread
    return [(row["title"], row["contents"]) for _, row in read_text_passages(folder, unread)]


def test_documents_are_read_with_their_headings(tmp_path):
    docx = pytest.importorskip("docx")
    for package in ("pypdf", "bs4", "pylatexenc"):
        pytest.importorskip(package)
    (tmp_path / "a.html").write_bytes(HTML)
    (tmp_path / "b.tex").write_bytes(TEX.encode("latin-1"))
    (tmp_path / "c.pdf").write_bytes(make_pdf("Emma is a novel by Jane Austen."))
    word = docx.Document()
    word.add_heading("Emma", 1)
    word.add_paragraph("A novel by Jane Austen.")
    word.save(str(tmp_path / "d.docx"))
    emma, dune = "A novel by Jane Austen.", "By\n\nFrank\nHerbert.\n\nOf 1965\n\na\nb"
    assert read(tmp_path) == [
        ("Emma", emma), ("Emma: Dune", dune), ("Novels: Emma", emma),
        ("Novels: Emma: Dune", "By Frank Hérbert."), ("c", "Emma is a novel by Jane Austen."),
        ("Emma", emma),
    ]  # fmt: skip
    assert describe_text_folder(tmp_path, 6, {}).endswith("passages (1 .pdf, 1 .html, 1 .docx, 1 .tex)")
    for name in ("c.pdf", "d.docx"):
        (tmp_path / name).write_bytes(b"PK" + (tmp_path / name).read_bytes()[:40])
    unread = {}
    assert len(read(tmp_path, unread)) == 4
    said = describe_text_folder(tmp_path, 4, unread)
    assert said.startswith("read 2 files into 4 passages (1 .html, 1 .tex); skipped 2: c.pdf (Stream has")
    assert "d.docx (File is not a zip" in said


def test_a_page_in_utf_8_is_read_whether_it_says_so_or_not(tmp_path):
    pytest.importorskip("bs4")
    (tmp_path / "a.html").write_bytes(
        "<p>Łódź is a city in Poland.</p><p>Ærø ligger i Danmark.</p>".encode()
    )
    (tmp_path / "b.html").write_bytes("<meta charset=latin-1><p>Ærø</p>".encode("latin-1"))
    (tmp_path / "c.html").write_bytes("<p>Tea</p>".encode("utf-16"))
    (tmp_path / "d.html").write_bytes("<meta charset=iso-2022-jp><p>日本</p>".encode("iso-2022-jp"))
    read_texts = [text for _, text in read(tmp_path)]
    assert read_texts == ["Łódź is a city in Poland.\n\nÆrø ligger i Danmark.", "Ærø", "Tea", "日本"]


def test_documents_that_cannot_be_read_are_named_with_what_reads_them(tmp_path, monkeypatch):
    monkeypatch.setattr("dlm_rag.retrieval.text_folder.find_spec", lambda name: None)
    assert list_document_suffixes() == []
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    (tmp_path / "b.md").write_text("# Emma\nA novel.")
    assert read(tmp_path) == [("Emma", "A novel.")]
    said = describe_text_folder(tmp_path, 1, {})
    assert said.startswith("read 1 file into 1 passage; skipped 1: a.pdf") and "dlm_rag[documents]" in said
