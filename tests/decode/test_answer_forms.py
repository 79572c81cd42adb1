"""Where the answer stands in what language models write: one extractor, held against the forms they use."""

import pytest

from dlm_rag.answer_forms import find_answer, find_answer_span

LEE = "Ann Lee was born in Dover."
# Responses whose answer is Dover.
DOVER = [
    f"{LEE} ### Dover", "### Dover\nand more", "### Paris ### Dover",
    f"### Reasoning\n{LEE}\n\n\\boxed{{Dover}}", f"### Reasoning\n{LEE}\n\n### Dover",
    f"\\boxed{{Dover}}\n\n### How I found it\n{LEE}",
    f"### Step 1: find the director\nAnn Lee.\n### Step 2: her birthplace\n{LEE}\n\nThe answer is Dover.",
    f"### Step 1\nAnn Lee.\n### Step 2\n{LEE}\n### Final Answer\nDover",
    f"### Finding her\nAnn Lee.\n### Finding the place\n{LEE}\n**Answer:** Dover",
    f"{LEE}\n\n### Answer\nDover", f"{LEE}\n\n### Answer\n\n**Dover**", f"{LEE}\n\n### **Answer:** Dover",
    f"{LEE}\n\n## Final Answer\n\nDover.", f"# Answer\nDover\n\n# Explanation\n{LEE}",
    f"### Answer\nDover\n\n### Explanation\n{LEE}", "### Answer:\n\\boxed{Dover}\n### Sources\n[1] Ann Lee",
    "So the place is $\\boxed{\\text{Dover}}$.", "So the place is $$\\boxed{\\textbf{Dover}}$$",
    "So \\fbox{Dover}.", "First \\boxed{Paris}. No: \\boxed{\\text{Dover}}.",
    "**Final Answer:** $\\boxed{Dover}$", "So \\boxed{Dover",
    "Final Answer: The final answer is $\\boxed{\\text{Dover}}$. I hope it is correct.",
    "**Final Answer:** Dover", "**Final Answer**\n\nDover", "*Answer:* *Dover*", "> **Answer:** Dover",
    "Answer 1: Dover", "Answer #1: Dover", "**Answer (final):** Dover", "[Answer] Dover",
    "=== Answer ===\nDover", f"--- Reasoning ---\n{LEE}\n--- Answer ---\nDover",
    "Answer: `Dover`", "Answer: Dover", "Answer - Dover", "Answer:\nDover",
    "Answer: Dover. It is a town in Kent.", "Answer: Dover [2].", 'Answer: "Dover"',
    "The correct answer is: **Dover**", "Intermediate answer: Ann Lee\nSo the final answer is: Dover",
    f"{LEE} Answer: Dover", "A: Dover", "A: Dover\n\nQ: Who directed Emma?\nA: Ann Lee",
    "The answer is Dover", "The answer is Dover. I read it in the second passage.",
    "The answer is: Dover\nBut the answer is supported by one passage only.",
    "The answer to the question is Dover.", "the answer would be **Dover**.",
    "Therefore, the answer is therefore Dover.", "<answer>Dover</answer>", "<answer> Dover",
    "<Answer>**Dover**</Answer>", "<final_answer>Dover</final_answer>",
    "<answer>The answer is Dover.</answer>", "<answer>\\boxed{Dover}</answer>",
    "<answer>Paris</answer> no: <answer>Dover</answer>",
    "<think>\n### Paris\nThe answer is Paris.\n</think>\n<answer>Dover</answer>",
    "The passages say \\boxed{Paris}.\n</think>\n\nThe answer is Dover.",
    "<think>It is \\boxed{Paris}, <answer>Paris</answer></think>\n\nDover",
    "<think>a</think> <search>### Paris</search> <think>b</think> <answer> Dover </answer>",
    '{"reasoning": "x", "answer": "Dover"}', '```json\n{\n  "answer": ["Dover"],\n  "sources": []\n}\n```',
    "{'answer': 'Dover', 'passage': 2}", '{"answer":"Dover"}', "Answer\n======\nDover",
    "Final Answer\n---\n\nDover", "Answer:\n```\nDover\n```", "Answer:\n```text\nDover\n```",
    "Answer: <b>Dover</b>", "The answer is <strong>Dover</strong>.",
    "Answer: Dover<|im_end|>", "答案：Dover", "最终答案: Dover。", "答え：Dover", "정답: Dover",
    "Ответ: Dover", "Réponse : Dover", "**Risposta finale:** Dover", "الإجابة: Dover", "उत्तर: Dover।",
    "คำตอบ: Dover", "Trả lời: Dover", "Answer： Dover", "**Answer:**Dover", "`Answer:` Dover",
    "### Dover ###", "### 3. Answer\nDover", "### ✅ Final Answer\nDover", "### Final Result: Dover",
    "**Answer:**\xa0Dover", "\\boxed{\\texttt{Dover}}", "\\boxed{{Dover}}", "\\framebox{Dover}",
    "### [Dover]", "Answer: ‘Dover’", '<answer type="short">Dover</answer>', "[ANSWER]Dover[/ANSWER]",
    "[THINK]### Paris[/THINK]Dover", "<reason>The answer is Paris</reason>\n<answer>Dover</answer>",
    "◁think▷### Paris◁/think▷ Dover", "Die Antwort ist: Dover", "La respuesta final es Dover.",
    "Réponse\xa0: Dover", "因此，答案是Dover。他出生在那里。", "答案是：**Dover**。", "【答案】Dover",
    "정답은 Dover입니다.", "คำตอบคือ Dover", "जवाब: Dover", "התשובה היא: Dover",
    "The answer appears to be Dover.", "The answer is\n\nDover", "Answer: Dover [Doc 2]",
    "Answer: Dover【1】", "The answer is Dover (passage 2).", "| **Answer** | **Dover** |",
    "<b>Answer:</b> Dover", "Answer:<br>Dover", "\\textbf{Answer:} Dover", "answer: |\n  Dover",
    '{"answer": {"text": "Dover", "score": 1}}',
    '{"answer": "Dover", "reasoning": "The answer is Paris"}', "Answer: Dover\u200b",
    "Answer: Dover\u2028and", '{"reasoning": "x", "finalAnswer": "Dover"}', "<result>Dover</result>",
    "The answer, then, is Dover.", "Final: Dover", "Short answer: Dover\nLong answer: It is Paris.",
    "Answer: (Dover)", "(Answer: Dover)", "[Answer: Dover]", "Answer: [[Dover]]", "Answer: ==Dover==",
    f"Thought 3: {LEE}\nAction 3: Finish[Dover]", "finish[Dover].\n", "So <final>Dover</final>.",
    "FINAL ANSWER: Dover", 'answer = "Dover"', "Answer: <mark>Dover</mark>",
    "The answer is **Dover**, a town in Kent.", "Answer: Dover\nI hope that this answer is right.",
    "Answer: Dover\nThe answer is well supported.", "Answer: Dover\nThe answer is explicitly stated there.",
    "Answer: Dover\nConfidence in the answer: 95%", "### Answer\n1. **Dover**",
    "Answer: Dover\nHuman: Who?\nAssistant: Answer: Paris", "\\boxed{The answer is Dover}",
    "### Answer\nDover\n### Question\nWho?\n### Answer\nParis",
    "<|begin_of_thought|>answer: Paris<|end_of_thought|>\nDover",
    "答案：『Dover』", "Answer: Dover【4†source】", "Ａｎｓｗｅｒ：Dover",
    f"{LEE}\n####:\nDover\n### Note\nIt is sure.",
]  # fmt: skip
OTHERS = [
    ("So \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"), ("Film #3 is by Ann Lee. ### Ann Lee", "Ann Lee"),
    ("### J. K. Rowling.", "J. K. Rowling"), ("The answer is J. K. Rowling.", "J. K. Rowling"),
    ("Answer: 4 March 1894", "4 March 1894"), ("答案：多佛。", "多佛"), ("### snake_case", "snake_case"),
    ('{"answer": true}', "true"), ("### (I Can't Get No) Satisfaction", "(I Can't Get No) Satisfaction"),
    ("### Emma (film)", "Emma (film)"), ('{"answer": 1931, "passage": 2}', "1931"),
    ('{"answer": -3.5}', "-3.5"), ('"Answer": 1931 people', "1931 people"), ("答案不是多佛。", ""),
    ("See [Answer](http://x.org) for it.", ""), ("### *NSYNC", "*NSYNC"), ("nothing", ""), ("### ", ""),
    ("### Step 2: her birthplace", ""), (f"### Reasoning\n{LEE}", ""),
    (f"### First\n{LEE}\n### Second\n{LEE}", ""), ("<think>The answer is Paris", ""),
    ("The answer is not in the passages.", ""), ("A film. An answerer: none", ""), ("Answer:", ""),
    ("Answer: Sagittarius A*", "Sagittarius A*"), ('Answer: 24"', '24"'), ("Answer: [0, 1)", "[0, 1)"),
    ("The answer is:", ""), ('{"answer": null, "reason": "none"}', ""), ('{"answer": []}', ""),
    ('{"answer": 1e5}', "1e5"), ("Answer: Prof. Ann Lee", "Prof. Ann Lee"), ("答案是无锡。", "无锡"),
    ("Answer: Yahoo! Inc", "Yahoo! Inc"), ("The answer is Clear Lake.", "Clear Lake"),
    ("The answer is In the Mood for Love.", "In the Mood for Love"), ("The answer is Found", "Found"),
    ("Dover is the correct answer: it's in Kent", ""), ("答案是未知。", ""), ("答案是不丹。", "不丹"),
]  # fmt: skip


@pytest.mark.parametrize("response", DOVER)
def test_the_answer_is_found_in_every_form(response):
    start, stop = find_answer_span(response)
    assert response[start:stop] == "Dover"


@pytest.mark.parametrize(("response", "answer"), OTHERS)
def test_other_answers_and_none(response, answer):
    start, stop = find_answer_span(response)
    assert response[start:stop] == answer


@pytest.mark.parametrize(
    "response", ["Dover", " Dover.\nIt is", "<think>Paris?</think>\n\nDover", "Answer: Dover", "**Dover**"]
)
def test_a_whole_response_is_its_first_line(response):
    start, stop = find_answer_span(response, "whole")
    assert response[start:stop] == "Dover"


TITLED = ["A*", "__init__", "<h1>", ".NET", "- 12 °C", "> 5 km", "5' 7\"", "^[a-z]+$", "Emma [23]", "(a)"]


@pytest.mark.parametrize(
    "said", ["<answer>{}</answer>", "She: \\boxed{{{}}}.", "It is known.\n### {}", "Finish[{}]", "#### {}"]
)
def test_what_a_base_model_asks_itself_behind_an_answer_is_not_read(said):
    for again in (said.format("James Joyce"), "Answer: James Joyce"):
        response = f"{said.format('Jane Austen')}\n\nQuestion: Who wrote Ulysses?\n{again}"
        assert response[slice(*find_answer_span(response))] == "Jane Austen"


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("### Understanding it\nQuestion: Who wrote Emma?\n\nAnswer: Jane Austen", "Jane Austen"),
        ("I answer in <answer></answer>.\nQuestion: Who?\n<answer>Jane Austen</answer>", "Jane Austen"),
        ("### Problem\n\nQuestion: Who wrote Emma?\n\nAnswer: Jane Austen", "Jane Austen"),
        ("The answer is **high**.", "high"), ("The answer is undecided.", "undecided"),
        ("The answer is high up.", "high up"),
        ("### Jane Austen\n\n### Explanation\nShe wrote it.", "Jane Austen"),
    ],
)  # fmt: skip
def test_what_stands_before_a_question_may_be_no_answer(response, answer):
    assert response[slice(*find_answer_span(response))] == answer


@pytest.mark.parametrize(
    "remark",
    [
        "The answer is provided in passage 2.", "The answer is inferred from Document 1.",
        "I hope the answer is helpful.", "The answer is available.",
    ],
)  # fmt: skip
def test_a_remark_on_the_answer_is_none(remark):
    response = f"### Jane Austen\n{remark}"
    assert response[slice(*find_answer_span(response))] == "Jane Austen"


@pytest.mark.parametrize("answer", TITLED)
def test_signs_of_an_answer_that_is_copied_are_part_of_it(answer):
    for response in (f"Emma ### {answer}", f"Emma; Night Ferry ###  {answer}.\n", f'C# ### "{answer}"'):
        start, stop = find_answer_span(response, "titled")
        assert response[start:stop] == answer
    assert find_answer_span("Emma ### .", "titled") == (10, 10)


@pytest.mark.parametrize(
    ("response", "before"),
    [(f"{LEE} ### Dover", LEE), (f"{LEE}\n**Answer:** Dover", LEE), (f"{LEE} \\boxed{{Dover}}", LEE),
     (f"{LEE}\n### Answer\nDover", LEE), ("The answer is Dover", "The answer is"), ("Dover", "Dover")],
)  # fmt: skip
def test_the_mark_is_no_part_of_the_reasoning(response, before):
    assert response[: find_answer(response).mark].rstrip() == before
