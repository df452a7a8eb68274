// When something is read again.

// Returns a function that has `read` called soon, but not more often than every `ms`; while the service is away, again and again.
export function throttled(read, ms) {
  let timer = null,
    readAt = 0;
  return function soon() {
    timer ??= setTimeout(
      async () => {
        timer = null;
        readAt = Date.now();
        try {
          await read();
        } catch (error) {
          if (error.status) throw error;
          soon();
        }
      },
      Math.max(0, readAt + ms - Date.now()),
    );
  };
}

// Returns a function that asks and shows the answer, unless a newer question has been asked meanwhile.
export function latest(ask, show) {
  let asked = 0;
  return async (...question) => {
    const turn = ++asked;
    try {
      const answer = await ask(...question);
      if (turn === asked) await show(answer, ...question);
    } catch (error) {
      if (turn === asked) throw error;
    }
  };
}

// Calls `read` now and every `ms`, until it returns true or is refused; while the service is away, again and again. A page
// that nobody looks at waits.
export async function follow(read, ms) {
  if (document.hidden) document.addEventListener("visibilitychange", () => follow(read, ms), { once: true });
  else {
    const isDone = await read().catch((error) => {
      if (error.status < 500) throw error;
    });
    if (!isDone) setTimeout(follow, ms, read, ms);
  }
}
