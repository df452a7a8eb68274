"""The card of islands on the page of a job: a row for each, and what the open round waits for."""

from kit import island_rounds as kit
from kit.processes.chromium import Browser
from kit.worlds.written_service import AT, RUNNING, Service
from shoal_service.store import island_rounds


def _cells(reader: Browser, island: int) -> list[str]:
    cells: list[str] = reader.run(
        f"[...document.querySelectorAll('#islands tr[data-island=\"{island}\"] td')].map((one) => one.textContent)"
    )
    return cells


def test_each_island_is_a_row_and_the_open_round_says_who_is_awaited(reader: Browser, written: Service) -> None:
    first = written.add_job(name="isle-1", islands={"num": 3, "index": 0})
    others = [written.add_job(name=f"isle-{n}", islands={"num": 3, "index": n - 1, "run": first.id}) for n in (2, 3)]
    for job in (first, *others[:1]):
        written.begin(job)
        written.report(job, RUNNING)
    kit.close(written.store, written.epoch, first.id, 0, [0, 1], now=AT)
    kit.close(written.store, written.epoch, first.id, 1, [0], loss=2.25, now=AT)
    note = written.store.writing(island_rounds.note, written.epoch)
    note(first.id, 2, [kit.contribution(0, loss=2.125, waited_s=2.5)], now=AT)
    reader.open(f"{written.url}/jobs/{others[0].id}")
    reader.sees("#open-round", "Round 2 is open, and has waited since")
    assert reader.text("#open-round").endswith("for islands 1, 2.")
    assert reader.text("#open-round").startswith("Mean loss in round 1: 2.25. ")
    assert _cells(reader, 0) == ["0", "isle-1", "RUNNING", "2", "0", "100 %", "2.125", "4 KiB", "2.5 s"]
    assert _cells(reader, 1) == ["1", "isle-2", "RUNNING", "0", "1", "not in it", "2.5", "4 KiB", "500 ms"]
    assert _cells(reader, 2)[3:] == ["–", "2", "not in it", "–", "–", "–"]
    assert reader.run("document.querySelector('#islands a').getAttribute('href')") == f"/jobs/{first.id}"
    assert reader.complaints() == []


def test_several_rounds_of_pairs_may_be_open_and_an_island_is_behind_in_its_own_alone(
    reader: Browser, written: Service
) -> None:
    first = written.add_job(name="isle-1", islands={"num": 4, "index": 0, "topology": "pairs"})
    for index in (1, 2, 3):
        islands = {"num": 4, "index": index, "run": first.id, "topology": "pairs"}
        job = written.add_job(name=f"isle-{index + 1}", islands=islands)
        written.begin(job)
        written.report(job, RUNNING)
    kit.close(written.store, written.epoch, first.id, 0, [0, 3], of=(0, 3), now=AT)
    kit.close(written.store, written.epoch, first.id, 1, [1], of=(1, 2), now=AT)
    note = written.store.writing(island_rounds.note, written.epoch)
    note(first.id, 2, [kit.contribution(3, islands=(1, 3))], now=AT)
    note(first.id, 3, [kit.contribution(2, islands=(0, 2))], now=AT)
    reader.open(f"{written.url}/jobs/{first.id}")
    reader.sees("#open-round", "Round 2 is open")
    text = reader.text("#open-round")
    assert "Round 3 is open" in text and text.endswith("for island 1.")
    cells = [_cells(reader, island) for island in range(4)]
    assert [(row[4], row[5]) for row in cells] == [("0", "50 %"), ("0", "100 %"), ("0", "not in it"), ("0", "50 %")]
