// Keeps parts of the page up to date: fetches it again and swaps what has changed.
"use strict";
{
  const parts = (page) => [...page.querySelectorAll("[data-txmsg-live]")];
  const [first] = parts(document);
  const pause = Number((first && first.dataset.txmsgEvery) || 1000);
  const refresh = async () => {
    if (!parts(document).some((part) => part.dataset.txmsgLive === "on")) return;
    try {
      const answer = await fetch(location.href, { credentials: "same-origin" });
      if (answer.ok) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const fresh = parts(page);
        parts(document).forEach((part, index) => {
          // What is the same stays: a button must not vanish under a finger.
          if (fresh[index] && !part.isEqualNode(fresh[index])) {
            part.replaceWith(fresh[index]);
          }
        });
      }
    } catch {
      // The server is away for a moment: the next look may find it.
    }
    setTimeout(refresh, pause);
  };
  if (first) setTimeout(refresh, pause);
}
