"use strict";
(() => {
  const source = new EventSource(document.currentScript.dataset.events);
  const link = document.getElementById("link");
  let busy = false, again = false;

  async function refresh() {
    if (busy) {
      again = true;
      return;
    }
    busy = true;
    try {
      const response = await fetch(location.href);
      const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
      if (response.ok) take(fresh);
    } catch {
      // the connection is gone; the next event tries again
    } finally {
      busy = false;
    }
    if (again) {
      again = false;
      refresh();
    }
  }

  function take(fresh) {
    for (const id of ["state", "learned", "health", "kept", "curves", "runs"]) {
      const old = document.getElementById(id), next = fresh.getElementById(id);
      if (old && next && !old.contains(document.activeElement)) old.replaceWith(next);
    }
    const data = fresh.getElementById("data");
    if (data && !document.getElementById("data")) location.reload();  // the first groups bring the explorer
    else if (data) document.dispatchEvent(new CustomEvent("groups", { detail: JSON.parse(data.textContent) }));
  }

  source.onmessage = refresh;
  source.onopen = () => { link.textContent = "This page follows the files."; };
  source.onerror = () => { link.textContent = "No connection: groupwise view has ended, or does not answer."; };
  document.addEventListener("change", (event) => event.target.form?.requestSubmit());
})();
