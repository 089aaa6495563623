// Shows the hosts of a large cluster with invented figures, as its server would send them: for machines without GPUs.
(async () => {
  const { HostsView } = await import("./hosts.js");
  const gpu = (index) => ({
    index, name: "H100", utilisation: 0.5 + index / 20, memory_used: 7e10, memory_total: 8e10, temperature: 60, clock: 1755,
    power: 500, errors: index === 3 ? ["Xid 79"] : [], throttled: [],
  });
  const hosts = Array.from({ length: 125 }, (_, at) => ({
    name: `node-${at}`, live: true, cpu: 0.4, memory_used: 1e11, memory_total: 1e12, gpus: Array.from({ length: 8 }, (_, index) => gpu(index)),
  }));
  window.view = new HostsView({ primary: () => null, failed: console.error });
  document.getElementById("panel").replaceChildren(view.element);
  view.shown = true;
  for (let at = 0; at < 5; at += 1) {
    view.take({ hosts: structuredClone(hosts) });
    await new Promise((done) => { setTimeout(done, 200); });
  }
})()
