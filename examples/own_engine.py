"""An engine of one's own, traced: `model.generate` on one prompt after the other. Run it as
``python examples/own_engine.py MODEL`` and watch it with ``tracer attach``."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

from engine_hooks.base.emitter import ENGINE, emitter
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import now
from engine_hooks.protocol.events import pack_u32
from engine_hooks.protocol.stages import Stage

trace = emitter()
trace.start("engine", "own engine")
emit = trace.emit_lifecycle
emit(events.Engine(now(), "own engine", model=sys.argv[1]))
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])


class Steps(LogitsProcessor):
    """Called when the logits of a step are there: that step is over, the next one begins."""

    count, key, prompt, began = 0, 0, 0, 0

    def __call__(self, input_ids, scores):
        at, first = now(), input_ids.shape[1] == self.prompt
        self.count += 1
        step = events.Step(
            self.began, self.count, logits=at - self.began, end=at - self.began, batch=1
        )
        # the only member gives way to the next one, which ran its whole prompt and got one token
        if first:
            step.joined, step.left = pack_u32([self.key]), pack_u32([self.key - 1])
            step.odd = pack_u32([self.key, self.prompt, 1])
        trace.emit(step)
        self.began = at
        return scores


steps = Steps()
for rid, text in (("one", "The capital of France is"), ("two", "One, two, three,")):
    steps.key = key = trace.hold(rid, ENGINE)
    emit(events.Received(now(), key, rid, "generate", offline=True))
    emit(events.Begin(now(), key, Stage.TOKENISE))
    inputs = tokenizer(text, return_tensors="pt")
    steps.prompt = inputs.input_ids.shape[1]
    emit(events.End(now(), key, Stage.TOKENISE, steps.prompt))
    emit(events.Queued(now(), key, rid, steps.prompt))
    steps.began = now()
    emit(events.Scheduled(steps.began, key, steps.began))
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False, logits_processor=[steps])
    emit(events.Finished(now(), key, "length", out.shape[1] - steps.prompt))
    emit(events.Released(now(), key))
    print(tokenizer.decode(out[0]))
trace.stop()
