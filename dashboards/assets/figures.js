/* Figures are drawn when they are about to be seen, the others one by one while the browser has nothing else to do:
   plotly.js takes longer to start and to draw than all the rest of a page. Dash finds this where it looks for plotly.js. */
(() => {
  const NEAR = '200px', PAUSE_MS = 200; // before what is out of sight is drawn: the page's tables come first
  const waiting = new Map(); // places that are not drawn yet, each with its newest figure and who listens to it
  const idle = window.requestIdleCallback || (then => setTimeout(then, 50));
  let loading, going = false;

  const load = () => (loading = loading || new Promise((done, failed) => {
    const script = document.createElement('script');
    script.src = window._dashPlotlyJSURL;
    script.onload = () => {
      done(window.Plotly);
      window.Plotly = { ...window.Plotly, react };
    };
    script.onerror = () => failed(new Error(`${script.src} did not load`));
    document.head.appendChild(script);
  }));

  const draw = async place => {
    near.unobserve(place);
    const plotly = await load().catch(error => (place.textContent = `${error.message}: load the page again.`, null));
    const asked = waiting.get(place);
    waiting.delete(place);
    if (!plotly || !asked || !place.isConnected) return;
    await plotly.react(place, asked.figure);
    for (const [event, listener] of asked.listeners) place.on(event, listener);
  };

  const near = new IntersectionObserver(
    entries => entries.filter(entry => entry.isIntersecting).forEach(entry => draw(entry.target)), { rootMargin: NEAR });

  const others = async () => {
    for (const place of waiting.keys()) {
      await new Promise(idle);
      await draw(place);
    }
    going = false;
  };

  const react = (place, figure) => {
    const asked = waiting.get(place);
    if (asked) asked.figure = figure;
    else if (place.data) return load().then(plotly => plotly.react(place, figure));
    else {
      const listeners = [];
      waiting.set(place, { figure, listeners });
      place.on = (event, listener) => listeners.push([event, listener]);
      near.observe(place);
      if (!going) going = setTimeout(others, PAUSE_MS);
    }
    return Promise.resolve(place);
  };

  window.Plotly = { react, Plots: { resize: () => Promise.resolve() } };
})();
