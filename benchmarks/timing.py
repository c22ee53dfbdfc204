"Timing for all benchmarks: the best of several rounds, and a ratio that is printed and has a lower bound."
import time


def best_of(f, rounds, clock=time.process_time):
    "Shortest time of a call: by default processor time, so that what else runs on the machine does not count."
    times = []
    for _ in range(rounds):
        start = clock()
        f()
        times.append(clock() - start)
    return min(times)


def ratio(name, ours, theirs, least):
    "Print how many times as fast as theirs ours is; AssertionError if not more than `least`."
    print(f"\n{name}: {ours * 1e3:.4g} ms beside {theirs * 1e3:.4g} ms, {theirs / ours:.1f} times as fast")
    assert theirs / ours > least, f"{name}: only {theirs / ours:.2f} times as fast as the plain way"
