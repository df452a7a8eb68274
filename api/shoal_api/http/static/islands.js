// The islands that train one model together: what each has contributed to the rounds, and which the open round waits for.
import { $, element, link, rows, say } from "./dom.js";
import { jobPage, jobPath, request } from "./api.js";
import { bytes, clock, number, percent, plural, seconds, whole } from "./format.js";
import { badge, ENDED } from "./states.js";
import { latest } from "./reading.js";

const MOST_ISLANDS = 64;

function ask({ id, spec }) {
  const query = new URLSearchParams({
    where: `islands.run == "${spec.islands.run}"`,
    columns: "islands.index",
    archived: true,
    limit: MOST_ISLANDS,
  });
  return Promise.all([request(`${jobPath(id)}/rounds`), request(`/v1/jobs?${query}`)]);
}

export const showIslands = latest(ask, ([ledger, jobs], { spec }) => {
  const byIsland = new Map(jobs.items.map((job) => [job.values["islands.index"], job]));
  const closed = ledger.items.filter((round) => round.decision);
  $("islands-card").hidden = false;
  rows("islands", [...Array(spec.islands.num).keys()], (island) => [
    ...cells(island, byIsland.get(island), ledger.items, closed),
    { "data-island": island },
  ]);
  const loss = closed.length ? `Mean loss in round ${whole(closed[0].round)}: ${number(closed[0].loss)}. ` : "";
  say("open-round", loss + describe(ledger.items, closed, byIsland), "dim");
});

function cells(island, job, rounds, closed) {
  const newest = rounds.find((round) => arrivalOf(round, island));
  const missed = closed.filter((round) => round.decision.absent.includes(island));
  const arrival = newest && arrivalOf(newest, island);
  return [
    whole(island),
    job ? element("td.title", link(job.name, jobPage(job.id))) : "deleted, or not visible",
    job ? badge(job.state, job.queue_position) : "–",
    whole(newest?.round),
    behind(newest, rounds, missed, closed),
    share(island, closed),
    number(arrival?.loss),
    bytes(arrival?.num_bytes),
    seconds(arrival?.waited_s),
  ];
}

const arrivalOf = (round, island) => round.arrived.find((arrival) => arrival.island === island);

// Rounds that were closed without the island since the newest one that it has contributed to. The service sends the
// newest rounds alone.
function behind(newest, rounds, missed, closed) {
  if (!closed.length) return "–";
  if (newest) return whole(missed.filter((round) => round.round > newest.round).length);
  return rounds.at(-1).round ? `${whole(missed.length)} or more` : whole(missed.length);
}

const memberOf = (round, island) => round.decision.members.find((one) => one.island === island);

function share(island, closed) {
  const round = closed.find((one) => memberOf(one, island) || one.decision.absent.includes(island));
  if (!round) return "–";
  const member = memberOf(round, island);
  return member ? percent(member.weight) : element("span.warn", "not in it");
}

// A paused island is not waited for, and neither is one that has ended. Several rounds of pairs may be open.
function describe(rounds, closed, byIsland) {
  const training = [...byIsland].filter(([, job]) => !ENDED.has(job.state) && job.state !== "PAUSED");
  const done = closed.length ? closed[0].round + 1 : 0;
  if (!training.length) return `No island trains; ${plural(done, "round")} closed.`;
  const open = rounds.filter((round) => !round.decision);
  if (!open.length) return `Round ${whole(done)} is open: no island has reached its end yet.`;
  const islands = training.map(([island]) => island);
  return open.map((round) => describeOpen(round, islands)).join(" ");
}

function describeOpen(open, training) {
  const awaited = training.filter((island) => open.arrived[0].islands.includes(island) && !arrivalOf(open, island));
  const first = Math.min(...open.arrived.map((arrival) => arrival.arrived_at));
  const named = `${awaited.length > 1 ? "islands" : "island"} ${awaited.sort((one, other) => one - other).join(", ")}`;
  return `Round ${whole(open.round)} is open, and has waited since ${clock(first)} for ${awaited.length ? named : "its decision"}.`;
}
