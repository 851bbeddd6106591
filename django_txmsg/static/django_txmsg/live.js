// Keeps parts of the page up to date: fetches it again and swaps what has changed. Says
// how old the page is, and why, when it cannot be renewed: an old page must not look new.
"use strict";
{
  const parts = (page) => [...page.querySelectorAll("[data-txmsg-live]")];
  const [first] = parts(document);
  const pause = Number((first && first.dataset.txmsgEvery) || 1000);
  const updated = document.querySelector("[data-txmsg-updated]");
  // The server's clock, in the project's time zone, as in all other times of the page.
  let renewed = updated && updated.textContent;
  const tell = (trouble) => {
    if (!updated) return;
    const at = renewed.replace("As of ", "");
    updated.textContent = trouble ? `Not renewed since ${at}: ${trouble}` : renewed;
    updated.classList.toggle("late", Boolean(trouble));
    // Read aloud when it stops, and not with every renewal.
    if (trouble) updated.setAttribute("role", "alert");
    else updated.removeAttribute("role");
  };
  const swap = (page) => {
    const fresh = parts(page);
    parts(document).forEach((part, index) => {
      const next = fresh[index];
      if (!next) return;
      // What is the same stays: a button must not vanish under a finger.
      if (!part.isEqualNode(next)) part.replaceWith(next);
    });
  };
  const refresh = async () => {
    if (!parts(document).some((part) => part.dataset.txmsgLive === "on")) return;
    if (document.hidden) {
      // A hidden page is renewed when it is shown again.
      document.addEventListener("visibilitychange", refresh, { once: true });
      return;
    }
    let trouble = "";
    try {
      const answer = await fetch(location.href, {
        credentials: "same-origin",
        cache: "no-store",
        signal: AbortSignal.timeout(Math.max(10000, 2 * pause)),
      });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (!answer.ok) {
        trouble = `the server answers with an error (${answer.status}).`;
      } else if (!parts(page).length) {
        trouble = "you are logged out. Load the page again.";
      } else {
        swap(page);
        const stamp = page.querySelector("[data-txmsg-updated]");
        if (stamp) renewed = stamp.textContent;
      }
    } catch {
      trouble = "the server does not answer.";
    }
    tell(trouble);
    setTimeout(refresh, pause);
  };
  if (first) setTimeout(refresh, pause);
}
