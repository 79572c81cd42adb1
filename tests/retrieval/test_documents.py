"""PDF, Word, HTML and LaTeX files in a folder of texts."""

import textwrap

import pytest

from dlm_rag.retrieval.text_folder import (
    describe_text_folder,
    join_words,
    list_document_suffixes,
    read_text_passages,
    split_passages,
)

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


INSERTED = """<w:p><w:r><w:t xml:space="preserve">The rent is </w:t></w:r><w:ins w:id="1" w:author="a"><w:r>
<w:t xml:space="preserve">900 euros </w:t></w:r></w:ins><w:del w:id="2" w:author="a"><w:r>
<w:delText>free </w:delText></w:r></w:del><w:sdt><w:sdtContent><w:r><w:t>a month.</w:t></w:r></w:sdtContent>
</w:sdt></w:p>"""
CONTROL = "<w:sdt><w:sdtContent><w:p><w:r><w:t>Heating is extra.</w:t></w:r></w:p></w:sdtContent></w:sdt>"


def test_all_that_a_word_file_shows_is_read_once(tmp_path):
    docx = pytest.importorskip("docx")
    word = docx.Document()
    word.add_heading("Rent\nand more", 1)
    for text in (INSERTED, CONTROL):
        body = docx.oxml.parse_xml(f"<w:body {docx.oxml.ns.nsdecls('w')}>{text}</w:body>")
        word.element.body[-1].addprevious(body[0])
    table = word.add_table(2, 2)
    table.cell(0, 0).merge(table.cell(0, 1)).text = "Flats"
    table.cell(1, 0).text = "Size"
    inner = table.cell(1, 1).add_table(1, 2)
    inner.cell(0, 0).text, inner.cell(0, 1).text = "30", "m²"
    word.save(str(tmp_path / "a.docx"))
    text = "The rent is 900 euros a month.\n\nHeating is extra.\n\nFlats\nSize | 30 | m²"
    assert read(tmp_path) == [("Rent and more", text)]


def test_words_that_a_page_breaks_are_whole():
    text = "The munici-\npality of Ed\u00ad\nwin is well-\nknown, known well, the North-\nEast, pre-\nand"
    whole = "The municipality of Edwin is well-known, known well, the North-\nEast, pre-\nand"
    assert join_words(text) == whole and join_words("Łódź-\nŻary") == "Łódź-\nŻary"
    assert join_words("a" * 10**6) == "a" * 10**6  # in no square of its length


def test_a_long_paragraph_is_cut_between_sentences_however_it_is_written():
    said = [
        "*Ann*'s town lies on the coast, since 1900.",
        "Boats go there twice a week, and the last at six.",
    ]
    plain = " ".join(said * 12)
    for text in (plain, textwrap.fill(plain, 72), "这座城市位于海岸。船每周去两次。" * 60):
        parts = split_passages(text)
        assert len(parts) > 1 and {part[-1] for part in parts} <= {".", "。"}
        assert "".join("".join(parts).split()) == "".join(text.split())
    for line in (
        "user{0},london,{0},active since may {0}",
        "disk s{0} is nearly full. Please look after it.",
    ):
        rows = "\n".join(line.format(n) for n in range(60))
        assert all(part.count("\n") > 5 for part in split_passages(rows)[:-1])
    rows = "\n".join(f"Line {n} says that Town{n} is one." for n in range(9000))
    assert " ".join(split_passages(rows)).split() == rows.split()


@pytest.mark.parametrize(
    ("name", "text", "passages"),
    [
        ("a.html", "<h1>Set</h1><pre># get it\nrun</pre>", [("Set", "# get it run")]),
        ("d.tex", "\\begin{verbatim}\n     # x\n\\end{verbatim}\n\\# y", [("d", "````\n# x\n````\n\n# y")]),
        ("b.html", b'<meta charset="iso-8859-1"><p>\x93x\x94 \x80', [("b", "“x” €")]),
        ("a.md", "---\ndate made: May\ntitle: Rent\n---\nx", [("Rent", "x")]),
        ("b.md", '---\ntitle: "Malm\\xF6"\n---\nx', [("Malmö", "x")]),
        ("c.md", "# A\n\nx\n\n<!--\n## Old\n-->\n\ny", [("A", "x\n\n<!--\n## Old\n-->\n\ny")]),
        ("d.md", "# A\n\n```c\n\\#x\n```\n## B\n\ny", [("A", "```c\n\\#x\n```"), ("A: B", "y")]),
        ("e.md", "# A\n\n`<!--`\n\n## B\n\ny", [("A", "`<!--`"), ("A: B", "y")]),
        ("f.md", "---\nScene One: a tree.\n---\nx", [("f", "---\nScene One: a tree.\n---\nx")]),
        ("e.html", "<h1>A</h1><p>&lt;pre&gt; is<h2>B</h2>x", [("A", "<pre> is"), ("A: B", "x")]),
        ("g.md", '---\ntitle: "P \\ud83d\\ude00"\n---\nx', [("P 😀", "x")]),
        ("f.tex", "\\section{Ways %\n of Work}x", [("Ways of Work", "x")]),
        ("a.tex", r"On \texttt{x} by \mbox{6}.", [("a", "On x by 6.")]),
        ("b.tex", "\\section{A\nB}\n\\href{u}{the} \\url{a%20b} c", [("A B", "the <a%20b> c")]),
        ("c.tex", "\\begin{minted}{c}\n# d % e\n\\end{minted}", [("c", "````\n# d % e\n````")]),
    ],
)  # fmt: skip
def test_what_looks_like_markup_is_text_and_markup_none(name, text, passages, tmp_path):
    pytest.importorskip("pylatexenc")
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert read(tmp_path) == passages


BOX = "<w:txbxContent><w:p><w:r><w:t>Pets are allowed.</w:t></w:r></w:p></w:txbxContent>"
NOTE = "<w:footnote><w:p><w:r><w:t>Since </w:t></w:r><w:r><w:t>May.</w:t></w:r></w:p></w:footnote>"


def test_boxes_and_notes_of_a_word_file_are_read_once(tmp_path):
    docx = pytest.importorskip("docx")
    from docx.opc.packuri import PackURI
    from docx.opc.part import Part

    names = " ".join(f'xmlns:{name}="http://schemas/{name}"' for name in ("mc", "wps", "v"))
    names += f" {docx.oxml.ns.nsdecls('w')}"
    word = docx.Document()
    word.add_heading("Rent", 1)
    drawn = f"<mc:Choice>{BOX}</mc:Choice><mc:Fallback>{BOX}</mc:Fallback>"
    held = word.add_paragraph("The rent is 900 euros.")._p
    drawn = f"<w:r {names}><mc:AlternateContent>{drawn}</mc:AlternateContent></w:r>"
    held.append(docx.oxml.parse_xml(drawn))
    word.add_heading("Garden", 1)
    word.add_paragraph("It is shared.")
    blob = f"<w:footnotes {names}>{NOTE}</w:footnotes>".encode()
    part = Part(PackURI("/word/footnotes.xml"), "application/xml", blob, word.part.package)
    word.part.relate_to(part, f"{docx.opc.constants.RELATIONSHIP_TYPE.FOOTNOTES}")
    word.save(str(tmp_path / "a.docx"))
    passages = [("Rent", "The rent is 900 euros.\n\nPets are allowed."), ("Garden", "It is shared.")]
    assert read(tmp_path) == [*passages, ("Notes", "Since May.")]


@pytest.mark.parametrize(
    ("page", "passages"),
    [
        ("<h1>Annual<br>Report</h1>a", [("Annual Report", "a")]),
        ("<h2><span>Part</span><div>One</div>of<sub>2</sub></h2>a<h3></h3>", [("Part One of2", "a")]),
        ("<option>a<option>b</option>c", [("a", "a\n\nb\n\nc")]),
        ("<details><summary>a</summary>b</details>c", [("a", "a\n\nb\n\nc")]),
    ],
)
def test_words_of_a_page_are_apart(page, passages, tmp_path):
    pytest.importorskip("bs4")
    (tmp_path / "a.html").write_text(page)
    assert read(tmp_path) == passages


def test_comments_of_latex_are_no_headings_and_verbatim_is_kept(tmp_path):
    pytest.importorskip("pylatexenc")
    (tmp_path / "a.tex").write_text(r"""% \title{Old}
\title{New}\begin{document}
\section{Emma}
Sold: 50\% \\% all
% \section{Dropped}
of \verb|100%| now.
\begin{verbatim}
# 10 % \section{None}
\end{verbatim}
\section{Dune} By Herbert.
\end{document}""")
    emma = "Sold: 50%\n\nof 100% now.\n\n````\n# 10 % \\section{None}\n````"
    assert read(tmp_path) == [("New: Emma", emma), ("New: Dune", "By Herbert.")]


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
