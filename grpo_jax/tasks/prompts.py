r"""How a problem is put to a model: one place for system prompts, templates and demonstrations.

A style asks for the answer in a form of its own, so each goes with rewards that read that form:

| style | the prompt | where the answer stands | rewards that read it |
|---|---|---|---|
| xml | chat: the article's system prompt asks for tags | `<answer>` block | correct, article |
| raw | few-shot text, `Question:` and `Answer:` | behind `####` | last_number |
| boxed | chat: the question, then how to answer it | `\boxed{}` | boxed, latex |
| qwen_boxed | chat: the Qwen-Math system prompt, then the question | `\boxed{}` | boxed, latex |
| raw_boxed | few-shot text whose answers end in a box | `\boxed{}` | boxed, latex |
| r1 | text: the template of DeepSeek-R1-Zero | `<answer>` block | correct |
| none | the question alone, as text | `\boxed{}` | boxed, latex |

(`grpo_jax.tasks.agreement.mismatch` tries a right and a wrong answer in the style out on the reward
of a run, and says so if it can't tell them apart.)

qwen_boxed, r1 and none are the three templates that the Dr. GRPO paper compares (arXiv:2503.20783,
table 1); r1 is the text of DeepSeek-R1 (arXiv:2501.12948, table 1). The first goes through the
tokenizer's chat template, so it is the paper's to the letter with a ChatML tokenizer only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo_jax.tasks.base import Prompt


@dataclass(frozen=True)
class Problem:
    """A question with its gold answer, before a style makes a prompt of it."""

    question: str
    answer: str  # clean, see `golds`
    solution: str = ""  # prose that leads to the answer and doesn't state its final form
    level: int | str | None = None
    columns: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Style:
    """A template. Chat styles fill messages, the others one text, shots included."""

    chat: bool
    head: str = ""  # the system prompt; or what the text begins with
    before: str = ""  # around each question
    after: str = ""
    begin: str = ""  # an answer is begin + solution + mark + gold + end
    mark: str = ""
    end: str = ""
    between: str = ""  # two problems of one text
    stops: tuple[str, ...] = ()
    fewest: int = 0  # shots that the style needs
    most: int | None = None  # shots that make sense in it; None: any number


_TAGGED = (
    "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n"
)
_STEPS = "Please reason step by step, and put your final answer within \\boxed{}."
_R1 = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves "
    "it. The Assistant first thinks about the reasoning process in the mind and then provides the "
    "User with the answer. The reasoning process is enclosed within <think> </think> and answer is "
    "enclosed within <answer> </answer> tags, respectively, i.e., <think> reasoning process here "
    "</think> <answer> answer here </answer>.\n"
)
_BOX = ("\n\nThe final answer is \\boxed{", "}.")

STYLES = {
    "xml": Style(
        chat=True,
        head=_TAGGED,
        begin="<reasoning>\n",
        mark="\n</reasoning>\n<answer>\n",
        end="\n</answer>\n",
    ),
    # no space after the last colon of raw text: it would split the token of a word that follows
    "raw": Style(
        chat=False,
        before="Question: ",
        after="\nAnswer:",
        begin=" ",
        mark="\n#### ",
        between="\n\n",
        stops=("\n\n", "Question:"),
        fewest=1,
    ),
    "boxed": Style(
        chat=True,
        after="\n\nReason step by step, then give the final answer in \\boxed{}.",
        mark=_BOX[0],
        end=_BOX[1],
    ),
    "qwen_boxed": Style(chat=True, head=_STEPS, mark=_BOX[0], end=_BOX[1]),
    # solutions in LaTeX have blank lines, so only the next question ends an answer
    "raw_boxed": Style(
        chat=False,
        before="Question: ",
        after="\nAnswer:",
        begin=" ",
        mark=_BOX[0],
        end=_BOX[1],
        between="\n\n",
        stops=("Question:",),
        fewest=1,
    ),
    "r1": Style(
        chat=False,
        head=_R1,
        before="User: ",
        after="\nAssistant: <think>",
        begin=" ",
        mark=" </think> <answer> ",
        end=" </answer>",
        between="\n",
        # not "</answer>", as the paper has it: a stop string is cut off, and the block is to close
        stops=("User:",),
    ),
    "none": Style(chat=False, mark=_BOX[0], end=_BOX[1], most=0),
}

# Shown by tasks whose rows hold no worked solutions, or whose solutions must not be given away.
EXAMPLES = (
    Problem(
        "A baker fills 6 trays with 8 rolls each and sells 35 of the rolls. How many are left?",
        "13",
        "The baker makes 6 * 8 = 48 rolls.\nAfter selling 35 there are 48 - 35 = 13 left.",
    ),
    Problem(
        "A train covers 180 km in 2 hours. How many km does it cover in 5 hours at that speed?",
        "450",
        "The train covers 180 / 2 = 90 km an hour.\nIn 5 hours that makes 90 * 5 = 450 km.",
    ),
    Problem(
        "Nora is 6 years older than Tim, and together they are 30 years old. How old is Tim?",
        "12",
        "Without the 6 years they would be 30 - 6 = 24 years old together.\n"
        "Tim has half of that, 24 / 2 = 12 years.",
    ),
    Problem(
        "A shirt costs 40 dollars and is sold at 25% off. What does it cost now, in dollars?",
        "30",
        "The discount is 40 * 25 / 100 = 10 dollars.\nThe shirt now costs 40 - 10 = 30 dollars.",
    ),
)


def style_of(name: str, shots: int) -> Style:
    """The style called `name`; ValueError for an unknown one, or for shots that it can't take."""
    if name not in STYLES:
        raise ValueError(f"unknown style {name!r}; there are {', '.join(STYLES)}")
    style = STYLES[name]
    if shots < style.fewest:
        raise ValueError(f"style {name!r} needs shots >= {style.fewest}: only they show the format")
    if style.most is not None and shots > style.most:
        raise ValueError(f"style {name!r} takes no shots, got {shots}")
    return style


def examples(shots: int) -> tuple[Problem, ...]:
    """The first so many of `EXAMPLES`; ValueError if there are fewer."""
    if not 0 <= shots <= len(EXAMPLES):
        raise ValueError(f"there are {len(EXAMPLES)} worked examples, got shots={shots}")
    return EXAMPLES[:shots]


def make_prompt(problem: Problem, style: Style, shown: Sequence[Problem]) -> Prompt:
    """`problem` as a prompt, after the solved problems `shown`, which a raw text holds too."""
    text, messages = problem.question, None
    if style.chat:
        messages = [{"role": "system", "content": style.head}] if style.head else []
        for example in shown:
            messages.append({"role": "user", "content": _asked(example, style)})
            messages.append({"role": "assistant", "content": _worked(example, style)})
        messages.append({"role": "user", "content": _asked(problem, style)})
    else:
        turns = [_asked(example, style) + _worked(example, style) for example in shown]
        text = style.head + style.between.join([*turns, _asked(problem, style)])
    return Prompt(text, problem.answer, problem.columns, problem.level, messages)


def right_completion(answer: str, style: Style) -> str:
    """What a model would write that does as the style asks, gives `answer` and no reasons."""
    return _worked(Problem("", answer, "..."), style)


def _asked(problem: Problem, style: Style) -> str:
    return f"{style.before}{problem.question}{style.after}"


def _worked(problem: Problem, style: Style) -> str:
    return f"{style.begin}{problem.solution}{style.mark}{problem.answer}{style.end}"
