// Goodput: a job's accounts as a stripe with its key.
import { $ } from "./dom.js";
import { percent, seconds, words } from "./format.js";
import { CATEGORIES, key, stripe } from "./stripe.js";

export function showAccounts(goodput) {
  const total = goodput ? goodput.total : 0;
  $("accounts").hidden = !total;
  $("ratio").textContent = total
    ? `${percent(goodput.ratio)} of ${seconds(total)} of requested worker time`
    : "no worker time yet";
  const parts = total
    ? CATEGORIES.map((name) => [name, goodput.seconds[name] || 0]).filter(([, amount]) => amount > 0)
    : [];
  $("stripe").replaceChildren(stripe(parts, 900, 20, "Worker time by category"));
  $("categories").replaceChildren(
    ...parts.map(([name, amount]) =>
      key(
        name,
        `${percent(amount / total)}, ${seconds(amount)}`,
        name === "recovering"
          ? Object.entries(goodput.recovering)
              .map(([cause, part]) => `${words(cause)} ${seconds(part)}`)
              .join(", ")
          : "",
      ),
    ),
  );
}
