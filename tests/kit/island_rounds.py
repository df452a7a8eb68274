"""Contributions of islands and decisions, for tests of the ledger and of what is shown of it."""

from collections.abc import Sequence
from pathlib import Path

from shoal_service.core.islands import Contribution, close_round
from shoal_service.store import Store, island_rounds
from shoal_workers.contract.islands import Announcement, IslandsSpec, RoundDecision, announcement_file, round_folder
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.worker_reports import SavedFile, SavedPart


def contribution(
    island: int,
    *,
    islands: Sequence[int] = range(3),
    step: int = 50,
    from_step: int = 0,
    tokens: int = 100,
    loss: float | None = 2.5,
    waited_s: float = 0.5,
) -> Contribution:
    return Contribution(
        island=island,
        islands=tuple(islands),
        from_step=from_step,
        step=step,
        tokens=tokens,
        loss=loss,
        num_bytes=4096,
        waited_s=waited_s,
        directory=f"island-{island}/step-{step}",
    )


def close(
    store: Store,
    epoch: int,
    run: str,
    number: int,
    islands: Sequence[int],
    *,
    of: Sequence[int] = range(3),
    loss: float | None = 2.5,
    now: float = 10.0,
) -> RoundDecision:
    """Close a round with these islands, in one transaction as the control loop does. `of`: all that merge in it."""
    spec = IslandsSpec(num=64, quorum=1, grace_s=0)
    with store.write(epoch) as tx:
        contributions = [contribution(island, islands=of, loss=loss) for island in islands]
        arrived = island_rounds.note(tx, run, number, contributions, now=now)
        decision = close_round(number, spec, arrived, (), now)
        assert decision is not None
        island_rounds.close(tx, run, decision, now=now)
    return decision


def announcement(
    rank: int,
    *,
    world_size: int,
    island: int = 0,
    number: int = 0,
    num_bytes: int = 10,
    step: int = 50,
    islands: Sequence[int] = (0, 1),
) -> Announcement:
    """What a rank of an island announces of a step."""
    part = SavedPart(
        generation=1,
        step=step,
        rank=rank,
        world_size=world_size,
        directory=f"island-{island}/{CheckpointName(step, 1, 1)}",
        files=(SavedFile(name=f"part-{rank}", bytes=num_bytes, crc32=1),),
        stall_s=0.0,
        write_s=0.0,
    )
    return Announcement(
        round=number, island=island, islands=tuple(islands), from_step=0, tokens=100, loss=2.5, waited_s=0.5, part=part
    )


def announce(root: Path, announced: Announcement) -> None:
    """Write an announcement where the ranks of an island write it. `root`: the directory of the rounds."""
    directory = root / round_folder(announced.round) / announced.part.directory
    directory.mkdir(parents=True, exist_ok=True)
    (directory / announcement_file(announced.part.rank)).write_text(announced.model_dump_json())
