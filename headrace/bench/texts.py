"""English for the text workloads."""

from __future__ import annotations

SYSTEM_PROMPT = (
    "You are the assistant of a small town's library. You help readers to find books, to understand what they read, and to "
    "learn the skills that they come to learn. Answer in plain words and short paragraphs. Say so when you do not know "
    "something, and say where a reader could look. Never make up a title, an author or a date. When a reader asks about "
    "opening hours, tell them that the library opens at nine on weekdays and at ten on Saturdays, and stays closed on "
    "Sundays. When a reader asks for help with homework, lead them to the answer by small steps and let them take the last "
    "one themselves. When a reader is upset, be kind first and useful second. Keep a calm and friendly tone, avoid jargon, "
    "and do not use more than about two hundred words unless a reader asks for more. Lists are welcome where there are more "
    "than three things to tell apart. If a question has several good answers, give the two best ones and say what speaks "
    "for each of them."
)

CHAT_PROMPTS = (
    "How does a water mill turn the flow of a river into flour?",
    "Explain to a ten-year-old why the moon seems to change its shape.",
    "Write a short letter to my neighbour about the noise of his lawn mower.",
    "What is the difference between a virus and a bacterium?",
    "Give me five names for a small grey cat, and a reason for each.",
    "My bread does not rise. What could be wrong?",
    "Summarise the story of Robinson Crusoe in four sentences.",
    "How do I find the median of a list of numbers in Python?",
    "What should I pack for a week of walking in the mountains in May?",
    "Translate into French: the library is closed on Sundays.",
    "Why does ice float on water?",
    "Plan three dinners for two people that need no oven.",
    "What were the causes of the French Revolution?",
    "Write a limerick about a clock that runs backwards.",
    "Explain compound interest with an example.",
    "How can I fall asleep more easily?",
    "What does the word 'serendipity' mean, and where does it come from?",
    "Give me a regular expression that matches a date such as 2024-05-17.",
    "Which trees keep their leaves in winter, and why?",
    "How do noise-cancelling headphones work?",
    "Write the first paragraph of a detective story that is set in a lighthouse.",
    "What is the fastest way to learn the names of the stars?",
    "Tell me about the life of Marie Curie.",
    "How many litres of paint do I need for a room of four by five metres?",
    "What is a good first programming project for a retired teacher?",
    "Explain what a database index does, without technical words.",
    "Is a tomato a fruit or a vegetable?",
    "Describe the taste of an apple to someone who has never eaten one.",
    "How do I politely refuse an invitation to a wedding?",
    "What happens to the light of a candle when it goes through a prism?",
    "Compare trains and aeroplanes for a journey of six hundred kilometres.",
    "Give me a weekly plan to prepare for a run of ten kilometres.",
)

PROSE = """\
The mill stood where the valley narrowed, and for as long as anyone could tell the river had worked for it. A weir of \
rough stones held the water back a little way upstream. From there a channel, no wider than a man is tall, led it along \
the foot of the hill to the wheel. The people of the village called the channel the race, and the part of it above the \
wheel the head race, and children were told not to play on its bank, which they did.

In spring the miller opened the sluice only by a hand's breadth. The snow of the mountains came down all at once, brown \
and loud, and would have broken the buckets of the wheel. In August he opened it as far as it went, and still the stones \
turned so slowly that his wife could finish a row of knitting between two sacks. He used to say that a good miller does \
not make the water run; he only decides where it goes.

When the engineers came to build the railway they stayed at the mill for half a year. One of them, a thin woman with a \
notebook, measured everything: how much water passed in a minute, how high it stood, how far it fell. She showed him that \
more than half of it went past the wheel without doing any work. He had always known that, he said, but he had not known \
that it was half. They built a second gate together, out of oak, and after that the mill ground as much in August as it \
had in June.

The notebook is now in the museum of the county town. Its pages are full of small drawings, of arrows that split and join \
again, and of numbers written with a hard pencil. On the last page there is a list of things that she wanted to try. Most \
of them were tried by others, in other valleys and much later. A wheel that turns on its side. A pipe that narrows. A \
basin that fills at night, when nobody grinds, and empties by day, when everybody does. Beside the last one she had \
written: it is not a question of how much there is, but of when it is there.

There are many ways to tell the history of such a place. One can tell it as a history of machines, each better than the \
one before. One can tell it as a history of families, who owned it, lost it and bought it back. The schoolteacher of the \
village told it as a history of bread. She took the children down to the river every September, gave each of them a \
handful of grain, and let them grind it between two flat stones. It took an hour to make a spoonful of flour. Then she \
walked with them through the mill, where the same hour filled a cart. She did not explain anything. The children \
explained it to each other on the way home.

Today the wheel turns a small generator, and the light in the museum comes from it. Visitors often ask how much power it \
gives, and are disappointed by the answer, which is that it would boil about four kettles. Then they go out on the \
bridge, look down at the water as it leaves the buckets, smooth and without hurry, and stay there longer than they had \
meant to.
"""
