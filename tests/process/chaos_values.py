"""What chaos.py injects into the memory of one rank: a bit that flips (row 35), and a gradient that is not finite (row 36)."""

from chaos_rows import SHAPES, WAYS, Plan, Row, Wrong, drawn_words, over_mpi, without

PARTS = {("tensors=8", "elements=20000"): (8, 20000), ("tensors=4", "elements=800"): (4, 800),
         ("tensors=3", "elements=300000"): (3, 300000)}  # parameters, and elements of each
INFINITIES = {"nan": "NaN", "infinity": "infinity", "-infinity": "-infinity"}  # as the library says it


def drawn_place(draw, words):
    """Parameter and element."""
    tensors, elements = PARTS[words[:2]]
    return draw.randrange(tensors), draw.choice((0, elements - 1, draw.randrange(elements), draw.randrange(elements)))


def drawn_culprits(draw, size):
    return sorted(draw.sample(range(size), 2 if size > 2 and draw.random() < 0.2 else 1))


def lines_of(job, word):
    return [line for r in job.ranks.values() for line in r.said(word)]


def expect(right, what, job):
    if not right:
        raise Wrong(f"{what}\n{job.story()}")


def some_on_hosts(draw, plan):
    """Some of the jobs that have room for it are of two hosts, as on_hosts() makes them."""
    plain = not any(word.startswith(("algorithm=", "exchange=")) for word in plan.words)  # bits do not depend on hosts
    if plan.size > 2 and not plan.inproc and plain and draw.random() < 0.3:
        plan.a_host = 2
    return plan


def expect_injected(job, culprits, least=1):
    struck = [int(line["rank"]) for line in lines_of(job, "fault")]
    expect(set(struck) == set(culprits) and len(struck) >= least, f"not injected on {culprits} {least} times: {struck}", job)


def row_35(draw, size):
    """A bit of a value, of the optimizer's state, or of the mean gradient that a rank steps with. It is found before the next
    step that compares it: with a sharded update only if that is the next one, or if it flips again before each. With `nonfinite`
    the norms of the mean gradient are compared before it is used."""
    agreement, inproc = draw.randint(1, 3), draw.random() < 0.15
    sharded = draw.random() < 0.3
    kind = "value" if sharded else draw.choice(("value", "state", "gradient"))
    words = draw.choice(SHAPES) + (f"update={'sharded' if sharded else 'replicated'}", *draw.choice(((), ("share=0",))))
    if kind == "state" or draw.random() < 0.5:
        words += ("momentum=0.9",)
    step = draw.randint(2, 5)  # before the first one all are zeros
    culprits = drawn_culprits(draw, size)
    parameter, element = drawn_place(draw, words)
    tensors, elements = PARTS[words[:2]]
    where = parameter * elements + element
    # None that rounding may undo, none that makes infinities, which would spread and make ranks alike again, and no two that
    # cancel in the mean gradient.
    lowest = 12 if kind == "value" else 20
    bits = draw.sample(range(lowest, 23), 2) if len(culprits) == 2 else [draw.choice([*range(lowest, 30), 31])]
    guard = draw.choice(((), ("nonfinite=stop",), ("nonfinite=skip",)))
    if guard and kind == "gradient" and len(culprits) == 1:
        bits = [draw.choice(range(lowest, 31))]  # a norm does not depend on a sign, and may become infinite
    again = sharded and draw.random() < 0.5
    times = range(step, step + (agreement if again else 1))
    faults = tuple(f"{rank}:flip_{kind}:{'reduced' if kind == 'gradient' else 'between'}:{at}:{32 * where + bit}"
                   for rank, bit in zip(culprits, bits) for at in times)
    made = step if kind == "gradient" else step - 1  # steps that are made before anything differs

    def part(at):  # what is compared before a step
        k, n = (at - 1) % agreement, tensors * elements
        return n * k // agreement, n * (k + 1) // agreement
    last = made + (agreement if again or not sharded else 1)
    looked = [at for at in range(made + 1, last + 1) if part(at)[0] <= where < part(at)[1]]
    plan = some_on_hosts(draw, Plan(size, words, faults, steps="steps=9", more=(f"agreement={agreement}", *guard), inproc=inproc))
    plan.reference = guard  # the ring adds in another order with it
    if guard and kind == "gradient":
        return with_other_norms(plan, culprits, step)
    if not looked:  # the step replaces it, or spreads it
        plan.well, plan.alike = True, made
        plan.also = lambda job: expect_injected(job, culprits, len(faults))
        return plan
    found, = looked
    begin, end = part(found)[0] // elements, (part(found)[1] - 1) // elements
    who = rf"ranks {', '.join(map(str, range(size)))} hold different values \(or optimizer states\), without a majority"
    if size > 2 and len(culprits) == 1:
        who = rf"rank {culprits[0]} holds other values \(or another optimizer state\) than the other {size - 1}"
    names = f'"w{begin}"' + (f' to "w{end}"' if end > begin else "")
    plan.verdicts = ((tuple(range(size)), rf"^DDP-E106 replicas differ: {who}, seen before step {found} in {names}\."),)
    plan.apart, plan.alike = tuple(culprits), made + (kind == "state")  # it shows in that rank's gradient a step later

    def also(job):
        expect_injected(job, culprits, len(culprits))
        held = {int(line["rank"]): line for line in lines_of(job, "values")}
        expect(len(held) == size and all(line["steps"] == str(found - 1) for line in held.values()),
               f"not all have made {found - 1} steps", job)
        # What has flipped in the state shows in a value after a step.
        others = {held[r]["digest"] for r in without(size, *culprits)}
        if kind != "state" or found > step:
            expect(others.isdisjoint(held[r]["digest"] for r in culprits), f"nothing has flipped: {held}", job)
    plan.also = also
    return plan


def with_other_norms(plan, culprits, step):
    """No rank makes the step before which the norm of the mean gradient has changed on some."""
    size = plan.size
    who = rf"ranks {', '.join(map(str, range(size)))} hold different mean gradients, without a majority"
    if size > 2 and len(culprits) == 1:
        odd, = culprits
        who = rf"rank {odd} holds another mean gradient than the other {size - 1}"
    plan.verdicts = ((tuple(range(size)), rf"^DDP-E106 replicas differ: {who}, seen by the norm in step {step}\. No value was changed\."),)

    def also(job):
        expect_injected(job, culprits, len(culprits))
        made = [line["steps"] for line in lines_of(job, "values")]
        expect(made == [str(step - 1)] * size, f"steps {made} of ranks that should have made {step - 1}", job)
    plan.also = also
    return plan


def row_36(draw, size):
    """A NaN or an infinity in a gradient: no rank makes that step. All throw and end, throw and go on, or skip it."""
    ways = [*WAYS, *((f"exchange={name}",) for name in ("bfloat16", "half", "int8", "top_k", "random_k", "power_sgd"))]
    words = drawn_words(draw, ways) + draw.choice(((), ("momentum=0.9",))) + draw.choice(((), (), ("clip=1",)))
    more = draw.choice(((), ("slices=333",))) if "elements=300000" not in words else ()
    step, steps, inproc = draw.randint(1, 5), 6, draw.random() < 0.15
    culprits = drawn_culprits(draw, size)
    faults, said = [], []
    for rank in culprits:
        (parameter, element), kind = drawn_place(draw, words), draw.choice(tuple(INFINITIES))
        faults.append(f"{rank}:{kind}:backward:{step}:{parameter * PARTS[words[:2]][1] + element}")
        said.append(f'rank {rank}\'s gradient of parameter "w{parameter}" is {INFINITIES[kind]} at element {element}')
    what = "the mean gradient is not finite: " + "; ".join(said)
    does = draw.choice(("stop", "go on", "skip"))
    more += (f"nonfinite={'skip' if does == 'skip' else 'stop'}",) + (("goes_on=1",) if does == "go on" else ())
    plan = some_on_hosts(draw, Plan(size, words, tuple(faults), steps=f"steps={steps}", more=more, inproc=inproc))
    plan.reference = ("nonfinite=skip",)  # the ring adds in another order with it
    if does == "stop":
        plan.verdicts = ((tuple(range(size)), rf"^DDP-E105 not finite: step {step}: {what}\. Nothing was changed\."),)

        def also(job):
            expect_injected(job, culprits, len(culprits))
            made = [line["steps"] for line in lines_of(job, "values")]
            expect(made == [str(step - 1)] * size, f"steps {made} of ranks that should have made {step - 1}", job)
    else:
        plan.well = True
        plan.reference += tuple(f"fault={rank}:skip:between:{step}" for rank in range(size))

        def also(job):
            expect_injected(job, culprits, len(culprits))
            not_made = lines_of(job, "skipped" if does == "skip" else "caught")
            expect(sorted((int(line["rank"]), int(line["number"])) for line in not_made) == [(r, step) for r in range(size)],
                   f"ranks have not all left out step {step}, or others too: {not_made}", job)
            told = [line["text"] for line in not_made]
            if does == "skip":  # a line on rank 0's stderr
                told = [line for r in job.ranks.values() for line in r.err.splitlines() if " was skipped: " in line]
                expect(len(told) == 1 and (job.size != size or told[0] in job.ranks[0].err), f"it is said {len(told)} times", job)
            expect(all(f"{what}{'' if does == 'skip' else '.'} " in text for text in told), f"not said: {what}", job)
            expect({line["steps"] for line in lines_of(job, "done")} == {str(steps - 1)}, "another number of steps", job)
    plan.also = also
    return plan


ROWS_OF_VALUES = [
    Row("35", "a bit flips in a value, in the optimizer's state, or in a reduced gradient", row_35),
    Row("36", "a gradient is not finite", row_36),
    Row("35m", "over MPI a bit flips", over_mpi(row_35, a_host=0), 1, 0.25),
    Row("36m", "over MPI a gradient is not finite", over_mpi(row_36, a_host=0), 1, 0.25)]
