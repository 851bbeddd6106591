// Shows what the server says, once a second, for as long as the order is under way.
"use strict";

async function refresh() {
  const answer = await fetch(location.href).catch(() => null);
  if (answer && answer.ok) {
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    document.getElementById("live").replaceWith(page.getElementById("live"));
  }
  wait();
}

function wait() {
  const live = document.getElementById("live");
  if (live && "live" in live.dataset) setTimeout(refresh, 1000);
}

wait();
