"use strict";
(() => {
  let version = document.currentScript.dataset.version;
  const link = document.getElementById("link");

  async function refresh() {
    const start = performance.now();
    try {
      const response = await fetch(location.href, { headers: { "If-None-Match": version } });
      if (response.ok) {
        take(new DOMParser().parseFromString(await response.text(), "text/html"));
        version = response.headers.get("ETag");
      }
      link.textContent = "This page follows the files.";
    } catch {
      link.textContent = "No connection: groupwise view has ended, or does not answer.";
    }
    // it waits 25 times as long as the page took, so that training nearby stays fast
    setTimeout(refresh, Math.min(Math.max(2000, 25 * (performance.now() - start)), 60000));
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
  document.addEventListener("change", (event) => event.target.form?.requestSubmit());
})();
