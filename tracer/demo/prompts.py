"""The prompts of the demo's clients: texts of several shapes, and the seeded choice among them.

The shapes matter, not the words: short questions; chats that share a system prompt, so that the
prefix cache has something to find; documents long enough to be prefilled in several chunks;
classifications of a few tokens; and crowds that together outgrow the KV cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["question", "chat", "document", "classify", "hang-up", "burst", "ask"]

Message = dict[str, str]
"""``{"role": …, "content": …}`` as the chat API takes it."""

WEIGHTS: Final[dict[Kind, int]] = {
    "question": 35,
    "chat": 25,
    "classify": 20,
    "document": 10,
    "hang-up": 10,
}
"""How often each kind arrives, in percent. Bursts come on their own schedule."""


def _paragraphs(text: str) -> tuple[str, ...]:
    """Return the paragraphs of a text, each as one line."""
    return tuple(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


SYSTEM_PROMPTS: Final = _paragraphs("""
You are the assistant of the Northwind ferry line, which sails between the mainland and nine
islands. Answer in two or three short sentences. Ferries leave every hour from six in the morning
until nine in the evening, and every two hours on Sundays. Bicycles travel free, dogs need a lead,
cars must be booked a day ahead. Tickets are sold at the quay and on board, and a day pass covers
all nine islands. When a storm stops the boats, tickets stay valid for a week. If you do not know
something, say so and give the number of the harbour office, which is open from seven to seven.
Never promise a refund; the office decides about those. Be friendly and do not use lists.

You help the members of a community workshop with their tools. The workshop has a wood lathe, two
band saws, a drill press, a laser cutter and a small forge. Members book a machine for at most three
hours and must have taken its safety course first. Eye protection is worn everywhere, gloves never
at a rotating machine. Explain things step by step, in plain words, and name the danger before the
trick. Materials that may not go into the laser cutter are vinyl, coated metal and anything unknown.
Answer briefly: most members read this on a telephone with dusty hands, between two cuts, and they
want to know the next thing to do rather than the whole theory.

You are a patient tutor of astronomy for pupils of about fourteen years. Use everyday comparisons,
keep to what can be seen with the naked eye or small binoculars, and ask one short question back at
the end of each answer so that the pupil has something to think about. Do not give numbers with more
than two digits unless you are asked for them. When the pupil is wrong, say first what was right in
the answer. Constellations are named in English and in Latin. If a question is not about the sky,
answer it in one sentence and lead back to the stars, because the lesson is short and the clouds may
come at any time.
""")

CHATS: Final[tuple[tuple[str, ...], ...]] = (
    (
        "When does the last boat leave today?",
        "And on a Sunday?",
        "Can I bring my bicycle?",
        "The sea looks rough. What happens to my ticket if you cancel?",
    ),
    (
        "I want to turn a bowl from a piece of cherry. Where do I start?",
        "The tool chatters near the rim. What am I doing wrong?",
        "How thin can I make the wall?",
        "Thanks. How do I finish it so that we can eat from it?",
    ),
    (
        "What is the bright star in the west after sunset?",
        "Why does it not twinkle like the others?",
        "Could I see its moons with my binoculars?",
        "Then what should I look for next week?",
    ),
)
"""Turns of a user, one conversation for each system prompt."""

QUESTIONS: Final = (
    "Why does bread get stale faster in the refrigerator?",
    "Explain how a sailing boat can travel against the wind.",
    "What is the difference between a llama and an alpaca?",
    "Give me three ideas for a rainy afternoon with two small children.",
    "How do noise-cancelling headphones work?",
    "What should I check before buying a used bicycle?",
    "Why is the sky red in the evening?",
    "Write a polite note to a neighbour whose dog barks at night.",
    "What makes a good index for a database table?",
    "How can I remember the names of people whom I have just met?",
    "Translate 'the early train was late again' into French and German.",
    "Which vegetables can I plant in a half-shaded garden?",
    "What happened to the library of Alexandria?",
    "Explain recursion to someone who has never programmed.",
    "How do I get candle wax out of a tablecloth?",
    "Is it better to rinse rice before cooking it, and why?",
    "What does an underwriter do all day?",
    "Suggest a name for a small café beside a railway bridge.",
    "How far away is the horizon when I stand on a beach?",
    "What is the point of a warm-up before running?",
    "Why do cats knead blankets?",
    "Fix this line of Python: for i in range(len(xs)) print(xs[i]",
    "What does the regular expression [a-z]+[0-9]? match? Mind the brackets: [/b], [[x]], [b + 1].",
    "Write a haiku about a lighthouse keeper who likes jazz.",
    "Что такое фотосинтез? Answer in English, please.",
    "ขอสูตรต้มยำแบบง่าย ๆ in two sentences, in English 🍲",
    "Summarise the plot of a detective story in which the gardener is innocent.",
    "When should I use a semicolon; when a full stop?",
)

(CLASSIFY_INSTRUCTION,) = _paragraphs("""
You sort messages to a city's service desk. Reply with one word and nothing else: roads, water,
waste, noise, parks or other. Examples. 'The lamp at the corner has been dark for a week' is roads.
'My bin was not emptied' is waste. 'There is a leak under the pavement in front of number nine' is
water. 'Someone drills at midnight' is noise. 'The swing is broken' is parks. 'How do I get
married?' is other.
""")

CLASSIFY: Final = (
    "A pothole on Mill Lane broke my rear wheel this morning.",
    "The fountain in the square has been running over since Sunday.",
    "Could somebody please cut the hedge beside the playground?",
    "There is a sofa in the stairwell of the car park and nobody fetches it.",
    "The bar below us turns the music up at eleven every single night.",
    "Which papers do I need for a new passport?",
    "No pressure in the tap on the third floor, all flats.",
    "The zebra crossing at the school can hardly be seen any more.",
    "Glass container is full and bottles stand all around it.",
    "An old oak has lost a large branch over the footpath.",
    "The building site starts at five in the morning, also on Saturdays.",
    "My neighbour keeps bees. Is that allowed?",
)

DOCUMENT: Final = _paragraphs("""
The survey of the estuary began in March, when the ice had gone from the upper channel and the first
of the tide gauges could be set. Two boats worked from the old customs quay. The larger carried the
echo sounder and a crew of four; the smaller, an open launch, took the samples of sediment and the
readings of salinity, which had to be made within an hour of slack water. On nineteen of the
fifty-one days planned the wind did not allow either to leave.

Below the road bridge the bed has risen by an average of eleven centimetres since the survey before
this one. Most of the rise lies on the western side, where the current turns away from the bank and
drops what it carries. The fairway itself has kept its depth, but it has moved thirty metres to the
east, and two of the green buoys now mark the edge of a shoal rather than the edge of the channel.
The harbour master was told by letter in June.

Salinity was measured at nine stations and three depths. In dry weeks the wedge of salt water
reached the weir, four kilometres further inland than the charts show. After heavy rain it was
pushed back behind the second bend within two tides. Farmers who pump from the side channels
reported damage to young plants in the last week of August, which agrees with the highest reading of
the year, taken at the station beside the sluice.

The reed beds on the north shore have grown by about a tenth. They catch sediment and calm the waves
of passing boats, and the count of nesting warblers has followed them: forty-three pairs, against
twenty-nine. The south shore tells the other story. Where the stone wall was raised the reeds have
gone, the mud is hard, and at low water the foot of the wall stands free over a length of two
hundred metres.

The gauges themselves were the weakest part of the work. Three of eight stopped during the summer.
One was struck by driftwood, one filled with silt until its float lay still, and one simply ran out
of battery because the panel that should have charged it had been put on the shaded side of the
post. The gaps were filled from the neighbours, and all values that were filled in this way are
marked in the tables of the appendix.

Costs stayed within what had been granted. Fuel was a fifth dearer than assumed, but the launch
needed no new engine, and the students who sorted the samples were paid by their own college. If the
survey is repeated, as we advise, in three years, it should be given its own gauges and should not
borrow those of the flood service, which were taken away for two weeks in October in the middle of
the highest tides.

For the ferries the finding is plain. The present timetable can be kept for about six more years.
After that the boats will touch the ground at the lowest tides on some thirty days a year, unless
the landing is moved to the outer end of the pier or the shoal is dredged. Dredging would have to be
repeated every four years, and the spoil is too fine to be of use on the beaches, so that it would
have to be taken out to sea.

Residents were heard in two evenings in the school hall. Most questions were about the smell on hot
days and about the wall. Several people asked why the old drawings of the sluice had not been used;
they had not been known, and one of them has since been lent to us by the family of the last keeper.
It shows a second culvert below the first, which must have been closed before the war, and which may
explain the hollow that the echo sounder found there.

We recommend four things. Move the two buoys before the winter. Leave the reeds on the north shore
alone, and plant new ones in front of the wall, behind a low fence of brushwood, as was done with
success further up the coast. Give the farmers a warning by telephone when the salinity at the
sluice passes two parts in a thousand. And open the old culvert far enough to look into it with a
camera, which costs a morning and may save a wall.

The work could not have been done without the volunteers who read the staff at the bridge every day
at noon. Their notes, in four school exercise books, are more complete than any of our instruments,
and where the two disagree the notes have so far been right. The books are kept in the library of
the town, on the shelf behind the door, and may be read by anyone who asks.
""")
"""Paragraphs of a report, about 100 tokens each."""

DOCUMENT_QUESTIONS: Final = (
    "What does the report recommend? Answer in three sentences.",
    "How has the river bed changed, and whom does that concern?",
    "Which instruments failed, and why?",
    "What should the ferry company plan for?",
    "Write a headline and a two-sentence summary for the local newspaper.",
)

STORIES: Final = (
    "Write a long story about a lighthouse keeper who finds a letter in a bottle.",
    "Tell the story of a train that stops in a station which is on no map.",
    "Write a long tale about two rival bakers and the flood that makes them friends.",
    "Tell me about a clockmaker's apprentice who can hear the future in the ticking.",
    "Write an adventure of three children in an abandoned observatory.",
    "Tell a long story about a postwoman on an island where nobody writes letters.",
    "Write about a cartographer who draws a river that does not exist yet.",
    "Tell the story of an orchestra that gets lost in the fog on its way to a concert.",
    "Write a long story about a beekeeper, a thief and a wedding.",
    "Tell of a winter in which the harbour froze and the ships grew into the town.",
)

ENDINGS: Final = (
    "Take your time and describe the people well.",
    "It should have a surprising end.",
    "Let it begin on a market day, with rain.",
    "Use a calm voice, as if read aloud beside a fire.",
    "There must be a dog in it, and the dog must matter.",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """A client's visit. `turns` are what the user says, one request each with the history before
    it; `max_tokens` the limit of each answer; `hang_up_after` tokens after which the client goes
    away; `think_s` pauses between turns."""

    kind: Kind
    turns: tuple[str, ...]
    max_tokens: int
    system: str = ""
    streaming: bool = True
    hang_up_after: int | None = None
    think_s: tuple[float, ...] = ()


class Script:
    """The visits in their order, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._pick = self._random.choice

    def next(self) -> Plan:
        (kind,) = self._random.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))
        return _EVERYDAY[kind](self)

    def burst(self) -> Plan:
        """Return one of the visits of a burst.

        Some 240 tokens that start differently each time and an answer of 80: eight of them fill a
        cache of 2,560 tokens while they are answered, so that some have to give way.
        """
        setting = "It plays where this report was written."
        story = f"{self._pick(STORIES)} {self._pick(ENDINGS)} {setting}"
        text = "\n\n".join([*self._random.sample(DOCUMENT, 2), story])
        return Plan("burst", (text,), self._random.randint(70, 90))

    def gap(self, rate: float) -> float:
        """Return the seconds to the next arrival of a Poisson stream of `rate` a second."""
        return self._random.expovariate(rate)

    def between_bursts(self, first: bool) -> float:
        return self._random.uniform(15, 20) if first else self._random.uniform(75, 105)

    def burst_size(self) -> int:
        return self._random.randint(10, 13)

    def _question(self) -> Plan:
        return Plan("question", (self._pick(QUESTIONS),), self._random.randint(24, 96))

    def _chat(self) -> Plan:
        topic = self._random.randrange(len(CHATS))
        turns = CHATS[topic][: self._random.randint(2, 4)]
        pauses = tuple(self._random.uniform(0.5, 3.0) for _ in turns[1:])
        most = self._random.randint(24, 64)
        return Plan("chat", turns, most, SYSTEM_PROMPTS[topic], think_s=pauses)

    def _document(self) -> Plan:
        # The first paragraphs are always the same: the same report asked about again can be found
        # in the prefix cache.
        length = self._random.randint(5, len(DOCUMENT))
        kept = DOCUMENT[:2] + tuple(self._random.sample(DOCUMENT[2:], length - 2))
        text = "\n\n".join([*kept, self._pick(DOCUMENT_QUESTIONS)])
        return Plan("document", (text,), self._random.randint(32, 72))

    def _classify(self) -> Plan:
        streaming = self._random.random() < 0.4  # programs that classify seldom stream
        return Plan("classify", (self._pick(CLASSIFY),), 3, CLASSIFY_INSTRUCTION, streaming)

    def _hang_up(self) -> Plan:
        text = f"{self._pick(STORIES)} {self._pick(ENDINGS)}"
        return Plan("hang-up", (text,), 160, hang_up_after=self._random.randint(4, 30))


_EVERYDAY: Final[dict[Kind, Callable[[Script], Plan]]] = {
    "question": Script._question,
    "chat": Script._chat,
    "classify": Script._classify,
    "document": Script._document,
    "hang-up": Script._hang_up,
}
