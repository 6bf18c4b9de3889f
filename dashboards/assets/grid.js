/* What the tables have beyond AG Grid's own: rows that open, links that keep the page, seeds below their variant. */
(() => {
  const functions = (window.dashAgGridFunctions = window.dashAgGridFunctions || {});
  const components = (window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {});

  /* What is missing sorts last, up or down. */
  functions.missingLast = (a, b, nodeA, nodeB, descending) => {
    const gone = [a, b].map(value => value === null || value === undefined);
    if (gone[0] || gone[1]) return gone[0] === gone[1] ? 0 : gone[0] === descending ? -1 : 1;
    return typeof a === 'number' && typeof b === 'number' ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
  };

  /* Of a cell that shows more than its value: whether its row is open. */
  functions.neverEqual = () => false;

  /* After every sort: pinned rows first, and each variant's own trials, in that order, below it. */
  functions.seedsBelow = params => {
    const below = {}, variants = [];
    for (const node of params.nodes) {
      if (node.data.parent === undefined) variants.push(node);
      else (below[node.data.parent] = below[node.data.parent] || []).push(node);
    }
    let place = 0;
    for (const node of [...variants.filter(node => node.data.pinned), ...variants.filter(node => !node.data.pinned)]) {
      params.nodes[place++] = node;
      for (const seed of below[node.data.id] || []) params.nodes[place++] = seed;
    }
  };

  /* What a grid is sorted by, for the address: fields in order, `-` before one that falls. */
  functions.tellSort = (params, store) => {
    const by = params.api.getColumnState().filter(column => column.sort).sort((a, b) => a.sortIndex - b.sortIndex);
    const told = by.map(column => (column.sort === 'desc' ? '-' : '') + column.colId).join(',');
    window.dash_clientside.set_props(store, { data: told });
  };

  /* A shadow at the right edge while columns lie beyond it: many systems show no scroll bar until one scrolls. */
  functions.tellEdge = (params, id) => {
    const table = document.getElementById(id), seen = table?.querySelector('.ag-center-cols-viewport');
    if (seen) table.classList.toggle('goes-on', seen.scrollLeft + seen.clientWidth < seen.scrollWidth - 1);
  };

  /* To another page of ours, without loading it all again. */
  const visit = (window.archlabVisit = href => {
    window.history.pushState({}, '', href);
    window.dispatchEvent(new CustomEvent('_dashprivate_pushstate'));
    window.scrollTo(0, 0);
  });

  /* What a reader chose stands in the address, without a new entry in the history: back leads to the page before. Links
     to other pages of the study, `to-<step>`, take along the keys that `carried[step]` says they know. Nothing happens
     when a click has led from this page already: `study/<step>`, or that of all studies, which is empty. */
  window.archlabAddress = (query, page, carried) => {
    const [, kind, study, step] = window.location.pathname.split('/'), said = new URLSearchParams(query);
    if ((study ? `${kind}/${step || ''}` : kind) !== page) return;
    window.history.replaceState(window.history.state, '', window.location.pathname + query);
    for (const [other, keys] of Object.entries(carried)) {
      const kept = new URLSearchParams(keys.filter(key => said.has(key)).map(key => [key, said.get(key)])).toString();
      const href = `/study/${study}/${other}${kept && '?' + kept}`;
      for (const link of document.querySelectorAll(`[id^="to-${other}"]`)) window.dash_clientside.set_props(link.id, { href });
    }
  };

  const go = href => event => {
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
    event.preventDefault();
    visit(href);
  };

  /* A cell that leads to `data.href`. */
  components.Link = props =>
    props.data.href
      ? React.createElement('a', { className: 'name', href: props.data.href, onClick: go(props.data.href) }, props.valueFormatted || props.value)
      : React.createElement('span', { className: 'name' }, props.valueFormatted || props.value);

  /* The name of a variant, with a button that shows its trials; that of a trial leads to it. */
  components.Opener = props => {
    if (props.data.href) return components.Link(props);
    const mark = { className: 'opener', 'aria-expanded': props.data.open, 'aria-label': `trials of ${props.value}`, onClick: () => props.setData(props.data.id) };
    return React.createElement(
      'span', { className: 'opens' }, React.createElement('button', mark, props.data.open ? '▾' : '▸'),
      React.createElement('span', { className: 'name' }, props.valueFormatted || props.value),
    );
  };
})();
