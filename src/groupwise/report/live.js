"use strict";
(() => {
  let version = document.currentScript.dataset.version;
  const link = document.getElementById("link");

  let timer, last = 0;

  async function refresh() {
    clearTimeout(timer);
    const start = performance.now(), mine = ++last;
    try {
      const response = await fetch(location.href, { headers: { "If-None-Match": version } });
      if (mine !== last) return;  // the reader has chosen something else
      if (response.ok) {
        take(new DOMParser().parseFromString(await response.text(), "text/html"));
        version = response.headers.get("ETag");
      }
      link.textContent = response.ok || response.status === 304 ? "This page follows the files."
        : response.status === 404 ? "Not found: the run is gone, or groupwise view was started again."
        : await response.text();
    } catch {
      link.textContent = "No connection: groupwise view has ended, or does not answer.";
    }
    // it waits 25 times as long as the page took, so that training nearby stays fast
    timer = setTimeout(refresh, Math.min(Math.max(2000, 25 * (performance.now() - start)), 60000));
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

  refresh();
  document.addEventListener("input", (event) => {  // what the reader chooses in the list of runs
    const { form } = event.target;
    if (!form) return;
    clearTimeout(timer);
    timer = setTimeout(() => {
      history.replaceState(null, "", `${form.action}?${new URLSearchParams(new FormData(form))}`);
      version = "";
      refresh();
    }, 300);
  });
})();
