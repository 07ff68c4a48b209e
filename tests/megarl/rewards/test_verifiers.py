import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.fenced import Block, fenced_blocks, last_block
from megarl.rewards.form import format as matches
from megarl.rewards.form import length_penalty, repetition_penalty
from megarl.rewards.json_match import json_match, json_schema, tool_call
from megarl.rewards.multiple_choice import multiple_choice
from megarl.rewards.scoring import LONGEST_SCORED_CHARACTERS
from megarl.rewards.text_match import numeric_match

PIECES = [r"\boxed{", r"\frac", "{", "}", r"\times", "10^", "/", "=", "-", "e", "999", "0", ".", ",", " ", "\u2212"]


@pytest.mark.parametrize(
    ("solution", "ground_truth", "options", "value"),
    [
        ("about 3.14", "3.14159", {"absolute": 0.01}, 1.0),
        ("about 3.14", "3.14159", {}, 0.0),
        ("so 1.3", 1, {"absolute": 0.3}, 1.0),  # 0.3 and 1.3 as they are written, not as binary fractions
        ("9900 it is", "10,000", {"relative": 0.01}, 1.0),
        ("9899", "10,000", {"relative": 0.01}, 0.0),
        ("-5", "-5.0", {"relative": 0.01}, 1.0),
        ("1.5e-3", "0.0015", {}, 1.0),
        ("12%", "0.12", {}, 1.0),
        ("first 3, then 4.", "4", {}, 1.0),
        ("first 3, then 4.", "3", {}, 0.0),
        (r"\boxed{3.14} m^2, of 5 tries", "3.14", {}, 1.0),
        (r"so \boxed{12\%}", "0.12", {}, 1.0),
        ("The answer is 12.5. This took 3 steps.", "12.5", {}, 1.0),
        ("**Answer:**\n3 + 4 = 7\nIt is number 2.", "7", {}, 1.0),
        ("the answer follows: it is\n7", "7", {}, 1.0),
        ("9.80 m/s^2", "9.8", {}, 1.0),
        ("9.80 m s^{-2}", "9.8", {}, 1.0),
        ("about 7^12", "7", {}, 1.0),
        ("from 10-18", "18", {}, 1.0),
        ("from 10-18", "-18", {}, 0.0),
        ("x = -18", "-18", {}, 1.0),
        ("\\boxed{\u22125}", "-5", {}, 1.0),
        ("\\boxed{\u22125}", "5", {}, 0.0),
        ("\\boxed{-5}", "\u22125", {}, 1.0),
        (r"\boxed{- 5}", "-5", {}, 1.0),
        (r"\boxed{x = - 5}", "-5", {}, 1.0),
        (r"\boxed{-\$5}", "-5", {}, 1.0),
        ("- 5 apples", "5", {}, 1.0),  # an item of a list
        (r"\boxed{3 \times 10^{4}}", "30000", {}, 1.0),
        (r"\boxed{3 \times 10^{4}}", "10", {}, 0.0),
        (r"\boxed{-1.5\cdot10^{-3}}", "-0.0015", {}, 1.0),
        ("about 3 \u00d7 10^4 m^2", "30000", {}, 1.0),
        (r"\boxed{10^{4}}", "10000", {}, 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", {}, 1.0),
        (r"\boxed{\frac{1}{2}}", "2", {}, 0.0),
        (r"\boxed{-\dfrac{1}{2}}", "-0.5", {}, 1.0),
        (r"\boxed{\tfrac{-1,000}{8}}", "-125", {}, 1.0),
        (r"\boxed{\frac12}", "0.5", {}, 1.0),
        (r"\boxed{2\frac{1}{2}}", "2.5", {}, 1.0),
        (r"\boxed{1.5\frac{1}{2}}", "0.5", {}, 1.0),
        (r"\boxed{\frac{3\times 10^{4}}{2}}", r"1.5 \times 10^4", {}, 1.0),
        (r"\boxed{\frac{1}{0}}", "0", {}, 0.0),
        (r"\boxed{- \frac{1}{2}}", "-0.5", {}, 1.0),
        (r"\boxed{-$\frac{1}{2}$}", r"- \frac{1}{2}", {}, 1.0),
        (r"\boxed{-\frac{-1}{2}}", "-0.5", {}, 0.0),
        (r"\boxed{\frac{\frac{1}{2}}{4}}", "0.125", {}, 1.0),
        (r"\boxed{\frac{1}{2}\times 10^{3}}", "500", {}, 1.0),
        (r"\boxed{x^2\frac{3}{4}}", "0.75", {}, 1.0),
        (r"\boxed{3\,\times\ 10^{4}}", "30000", {}, 1.0),
        ("\\boxed{3 x 10^4}", "30000", {}, 1.0),
        ("\\boxed{3 x 10^4}", "10000", {}, 0.0),
        (r"\boxed{(1.5 \pm 0.2) \times 10^{3}}", "1000", {}, 0.0),
        (r"\boxed{10^{2}5}", "1e25", {}, 0.0),
        ("\\boxed{5}", "20/4", {}, 1.0),
        (r"\boxed{1/2}", "2", {}, 0.0),
        (r"\boxed{-1/2}", r"-\frac{1}{2}", {}, 1.0),
        (r"\boxed{30{,}000}", "30000", {}, 1.0),
        (r"\boxed{30,\!000}", "30000", {}, 1.0),
        (r"\boxed{1\,030\,000.5}", "1030000.5", {}, 1.0),
        (r"\boxed{0.123\,456}", "0.123456", {}, 1.0),
        (r"\boxed{3\,45}", "45", {}, 1.0),
        (r"\boxed{12 %}", "12 %", {}, 1.0),
        (r"so $12$% or \boxed{12\,\%}", r"12\%", {}, 1.0),
        ("The answer is $12$ %.", "0.12", {}, 1.0),
        ("1e999", "1", {}, 0.0),
        ("1e99999999999", "1", {}, 0.0),
        ("none", "1", {}, 0.0),
        ("3" + "." * 400, "3", {}, 0.0),
    ],
)
def test_numeric_match(solution, ground_truth, options, value):
    assert numeric_match("any", solution, ground_truth, **options) == value


@given(st.text() | st.text("0123456789.,eE+-%") | st.lists(st.sampled_from(PIECES)).map("".join))
def test_numeric_match_takes_any_text(text):
    assert numeric_match("any", text, "7") in (0.0, 1.0)


@pytest.mark.parametrize(
    ("solution", "chosen"),
    [
        ("Answer: B", "B"),
        ("**Answer:** B", "B"),
        ("answer is (B).", "B"),
        ("The answer is **B**", "B"),
        ("The correct answer is: B) because", "B"),
        ("the correct option is [B]", "B"),
        ("Final answer: option B", "B"),
        (r"\boxed{B}", "B"),
        (r"so $\boxed{\text{B}}$", "B"),
        (r"\boxed{(B)}", "B"),
        ("Answer: A. No, wait.\nAnswer: B", "B"),
        ("It is (A) or (C), and I take (B)", "B"),
        ("Of (A) and (C), Answer: B. See (C).", "B"),  # a stated answer before a letter in brackets
        ("**Answer: C**\n\n- Option A is wrong.\n- Option D is not right.", "C"),
        (r"The answer is \boxed{C}. So choice A fails, and the answer is not A.", "C"),
        ("My answer: A triangle. So it is (C).", "C"),
        ("Therefore the answer I choose is (B).", "B"),
        ("The answer is A because it is", "A"),
        (r"\boxed{\textbf{(B)}}", "B"),
        (r"\boxed{\mathrm{B}}", "B"),
        (r"\boxed {\text{B. Paris}}", "B"),
        (r"\boxed{(B)\ 5}", "B"),
        (r"\boxed{B: 5}", "B"),
        ("Answer: $B$", "B"),
        (r"Answer: \text{B}", "B"),
        (r"The answer is $\mathbf{(B)}$.", "B"),
        ("The answer is: option (B)", "B"),
        ("The answer is **B) Paris**.", "B"),
        ("The final answer is:\n\n**B**", "B"),
        (r"\boxed{7}, which is option B", "B"),
        (r"\boxed{Because}", None),
        ("thinking\n\nB", "B"),
        ("thinking\n**B.**\n", "B"),
        ("Answer: Because", None),
        ("A cat sat", None),
        ("Answer: E", None),
        ("", None),
    ],
)
def test_multiple_choice_takes_the_option_that_is_stated_last(solution, chosen):
    for truth in "ABCD":
        assert multiple_choice("any", solution, truth) == float(truth == chosen)


@pytest.mark.parametrize(
    ("solution", "ground_truth", "score", "valid"),
    [
        ('{"b": [1, 2.0], "a": null}', '{"a": null, "b": [1.0, 2]}', 1.0, 1.0),
        ('so:\n```json\n{"a": 1}\n```\nvoilà', {"a": 1}, 1.0, 1.0),
        ('```json\n{"a": 2}\n```\n```json\n{"a": 1}\n```', {"a": 1}, 1.0, 1.0),
        ("true", "1", 0.0, 1.0),
        ("[true]", [True], 1.0, 1.0),
        ('{"a": 1}', {"a": 1, "b": 2}, 0.0, 1.0),
        ("[1]", [1, 2], 0.0, 1.0),
        ("NaN", [1], 0.0, 0.0),
        ('so: {"a": 1}', {"a": 1}, 0.0, 0.0),
        ("", {"a": 1}, 0.0, 0.0),
        ("[" * 10**5, [1], 0.0, 0.0),
        ("[" * 150 + "]" * 150, [1], 0.0, 0.0),
        ("9" * 10**5, [1], 0.0, 0.0),
    ],
)
def test_json_match(solution, ground_truth, score, valid):
    assert json_match("any", solution, ground_truth) == {"score": score, "valid": valid}


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("solution", "score", "valid"),
    [
        ('{"name": "Ada", "age": 36}', 1.0, 1.0),
        ('{"name": "Ada"}', 1.0, 1.0),
        ('{"name": "Ada", "age": -1}', 0.0, 1.0),
        ('{"name": "Ada", "x": 1}', 0.0, 1.0),
        ("{}", 0.0, 1.0),
        ("name: Ada", 0.0, 0.0),
    ],
)
def test_json_schema(solution, score, valid):
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        assert json_schema("any", solution, schema) == {"score": score, "valid": valid, "unchecked": 0.0}


TREE = {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}, "$ref": "#/$defs/tree"}
NAMED = {
    "$id": "https://megarl.org/schema",
    "$ref": "part",
    "$defs": {"part": {"$id": "part", "$ref": "#/$defs/list", "$defs": {"list": {"type": "array"}}}},
}


@pytest.mark.parametrize(
    "schema",
    [
        TREE,
        NAMED,
        {"type": "array", "default": {"$ref": "#/none"}},
        {"type": "array", "example": {"$ref": "not a ref"}, "x-example": {"$ref": "#/nowhere"}},
    ],
)
def test_references_of_a_schema_are_followed(schema):
    assert [json_schema("any", text, schema)["score"] for text in ("[[], [[]]]", "{}")] == [1.0, 0.0]


CALL = {"name": "weather", "arguments": {"city": "Paris", "days": 2}}


@pytest.mark.parametrize(
    ("solution", "ground_truth", "score", "names"),
    [
        (f"I look.<tool_call>\n{json.dumps(CALL)}\n</tool_call>", CALL, 1.0, 1.0),
        (json.dumps(CALL), json.dumps(CALL), 1.0, 1.0),
        (json.dumps({**CALL, "arguments": json.dumps(CALL["arguments"])}), CALL, 1.0, 1.0),
        (json.dumps({**CALL, "arguments": {"city": "Rome", "days": 2}}), CALL, 0.0, 1.0),
        (json.dumps({**CALL, "name": "time"}), CALL, 0.0, 0.0),
        (f"<tool_call>{json.dumps(CALL)}</tool_call>" * 2, CALL, 0.0, 0.0),
        (f"<tool_call>{json.dumps(CALL)}</tool_call>" * 2, [CALL, CALL], 1.0, 1.0),
        (f"<tool_call>{json.dumps(CALL)}</tool_call><tool_call>{{</tool_call>", CALL, 0.0, 0.0),
        (f"<tool_call>{json.dumps(CALL)}", CALL, 0.0, 0.0),
        (f"<tool_call>{json.dumps(CALL)}</tool_call><tool_call>{json.dumps(CALL)[:9]}", CALL, 0.0, 0.0),
        (f"<tool_call>{json.dumps(CALL)}</tool_call><tool_call>{json.dumps(CALL)}", [CALL, CALL], 0.0, 0.0),
        (f"I use <tool_call> once:<tool_call>{json.dumps(CALL)}</tool_call>", CALL, 1.0, 1.0),
        ('{"name": "weather"}', CALL, 0.0, 0.0),
        ('{"name": "weather", "arguments": "{"}', CALL, 0.0, 0.0),
        ("[]", CALL, 0.0, 0.0),
        ("no call", CALL, 0.0, 0.0),
    ],
)
def test_tool_call(solution, ground_truth, score, names):
    assert tool_call("any", solution, ground_truth) == {"score": score, "names": names}


@pytest.mark.parametrize(
    ("function", "ground_truth", "said"),
    [
        (numeric_match, "seven", "must be a number, found 'seven'"),
        (multiple_choice, "E", "must be one of ABCD, found 'E'"),
        (multiple_choice, "", "must be one of ABCD"),
        (json_match, "{", "ground truth of json_match is no JSON"),
        (json_match, {"a": 1, "b": [{"c": None}]}, "ground truth of json_match holds None.*give it as JSON text"),
        (tool_call, {"name": "f", "arguments": {"a": 1, "b": None}}, "ground truth of tool_call holds None"),
        (json_schema, {"type": "object", "minimum": None}, "ground truth of json_schema holds None"),
        (json_schema, {"$ref": "#/$defs/a"}, r"no schema: its \$ref '#/\$defs/a' leads to none"),
        (json_schema, {"items": {"$ref": "#/title"}, "title": "a"}, r"no schema: its \$ref '#/title' leads to none"),
        (json_schema, {"anyOf": [{"$ref": "#"}]}, r"no schema: its \$ref '#' leads to none"),
        (json_schema, {"properties": {"default": {"$ref": "#/a"}}}, r"no schema: its \$ref '#/a' leads to none"),
        (json_schema, {"$ref": "file:///etc/hostname"}, r"no schema: its \$ref 'file:///etc/hostname' leads to none"),
        (json_schema, {"type": "strin"}, "ground truth of json_schema is no schema: 'strin' is not valid"),
        (tool_call, {"name": "f"}, "must be calls with name and arguments"),
        (tool_call, [], "must be calls with name and arguments"),
    ],
)
def test_a_ground_truth_that_cannot_be_one_is_an_error(function, ground_truth, said):
    with pytest.raises(ValueError, match=said):
        function("any", "7", ground_truth)


THINKS = r"<think>.*?</think>\s*<answer>.*?</answer>"


@pytest.mark.parametrize(
    ("solution", "value"),
    [
        ("<think>a\nb</think>\n<answer>7</answer>\n", 1.0),
        ("<think>a</think><answer>7</answer> and more", 0.0),
        ("<answer>7</answer>", 0.0),
    ],
)
def test_format_is_of_the_whole_response(solution, value):
    assert matches("any", solution, None, pattern=THINKS) == {"score": value, "unchecked": 0.0}


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 0.0), (100, 0.0), (125, -0.25), (150, -0.5), (200, -1.0), (999, -1.0)]
)
def test_length_penalty_grows_between_two_lengths(tokens, value):
    assert length_penalty("any", "", None, response_tokens=tokens, free_tokens=100, max_tokens=200) == value


@pytest.mark.parametrize(
    ("solution", "value"), [("a b c", 0.0), ("", 0.0), ("a b a b", -1 / 3), ("a a a a", -2 / 3), ("one", 0.0)]
)
def test_repetition_penalty_is_the_share_of_repeated_runs(solution, value):
    assert repetition_penalty("any", solution, None, words=2) == pytest.approx(value)


def test_blocks_between_fences():
    text = "a\n```python\nx\n```\n```\ny\n\n```\n  ```JSON  \nz\n  ```\n```py\nnever closed"
    assert list(fenced_blocks(text)) == [Block("python", "x\n"), Block("", "y\n\n"), Block("json", "z\n")]
    assert last_block(text, ("python", "py")) == "x\n"
    assert last_block(text, ("ruby",)) == "y\n\n"
    assert last_block("no fence", ("python",)) is None


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("```python\nx = input(\n</think>\n```python\ny\n```", [Block("python", "y\n")]),  # one was never closed
        ("as\n```x+1```\nsays:\n```python\ny\n```", [Block("python", "y\n")]),
        ("```python title=a.py\ny\n```", [Block("python", "y\n")]),
        ('```json {"a": 1} ```\n```python\ny\n```', [Block("json", '{"a": 1}'), Block("python", "y\n")]),
        ("```json 1```", [Block("json", "1")]),
        ("```python\ns = '\n```x```\n'\n```", [Block("python", "s = '\n```x```\n'\n")]),
        ("````markdown\n```python\ny\n```\n````", [Block("markdown", "```python\ny\n```\n")]),
        ("```\ny\n````", [Block("", "y\n")]),
        ("```python\ny\n", []),
    ],
)
def test_fences_are_paired_as_they_are_meant(text, blocks):
    assert list(fenced_blocks(text)) == blocks


@given(st.lists(st.tuples(st.sampled_from(["", "python", "sh"]), st.text(st.characters(exclude_characters="`")))))
def test_every_block_is_found(blocks):
    text = "".join(f"```{language}\n{body}\n```\n" for language, body in blocks)
    assert [(found.language, found.text) for found in fenced_blocks(text)] == [
        (language, f"{body}\n") for language, body in blocks
    ]


EVIL = [
    "<tool_call>",
    "```json\n",
    "```",
    "(A",
    "\\boxed{",
    "answer: ",
    " \n",
    "1,",
    "[",
    "```x ",
    '{"a":',
    "9e9 ",
    "\\frac{1}{",
    "- ",
    "*",
]


@pytest.mark.parametrize("piece", EVIL)
def test_the_longest_responses_are_judged(piece):
    # With the square of the length, any of these would run into the time limit of the tests.
    text = piece * (LONGEST_SCORED_CHARACTERS // len(piece))
    assert numeric_match("any", text, "7") == 0.0
    assert multiple_choice("any", text, "B") == 0.0
    assert json_match("any", text, "[7]")["score"] == 0.0
    assert tool_call("any", text, CALL)["score"] == 0.0


def test_the_longest_line_that_begins_like_a_fence_is_judged():
    text = "```" + " " * (LONGEST_SCORED_CHARACTERS - 4) + "`"
    assert list(fenced_blocks(text)) == []
