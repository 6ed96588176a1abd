//! The nearest marked node at or above a node, in a forest of nodes that grows at its leaves and by splitting nodes.
//!
//! A link-cut tree (Sleator and Tarjan, "A data structure for dynamic trees", 1983): every path from the root that was asked for
//! last is one splay tree, ordered by depth, and the others hang from it. A question, a mark and a new node cost logarithmic time,
//! amortised, whatever the shape of the forest and the order of what is done.

/// A node of the forest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NodeIndex(u32);

impl NodeIndex {
    /// No node.
    const NONE: Self = Self(u32::MAX);

    pub(super) fn index(self) -> usize {
        self.0 as usize
    }

    fn some(self) -> Option<Self> {
        Some(self).filter(|node| *node != Self::NONE)
    }
}

struct Node {
    /// In its splay tree; of the root of one, the node of the forest above its uppermost.
    parent: NodeIndex,
    /// What is above it and what is below it on its path.
    above: NodeIndex,
    below: NodeIndex,
    marked: bool,
    /// Whether it or anything under it in its splay tree is marked.
    any_marked: bool,
}

/// The nodes and how they hang together.
#[derive(Default)]
pub(super) struct Paths {
    nodes: Vec<Node>,
    /// Rotations, changes of path, and nodes passed on the way down.
    #[cfg(test)]
    pub(super) steps: usize,
}

impl Paths {
    /// Bytes that a node takes, with room for the next ones.
    pub(super) const NODE_BYTES: usize = size_of::<Node>() * 2;

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Adds a leaf.
    pub(super) fn add_below(&mut self, parent: Option<NodeIndex>) -> NodeIndex {
        self.add(parent.unwrap_or(NodeIndex::NONE))
    }

    /// Adds a node between this one and what is above it. All that hangs from this one goes on doing so.
    pub(super) fn add_above(&mut self, node: NodeIndex) -> NodeIndex {
        self.expose(node);
        let new = self.add(node);
        let above = std::mem::replace(&mut self.nodes[node.index()].above, new);
        self.nodes[new.index()].above = above;
        if let Some(above) = above.some() {
            self.nodes[above.index()].parent = new;
        }
        self.recount(new);
        self.recount(node);
        new
    }

    /// Marks a node, or takes its mark.
    pub(super) fn set_marked(&mut self, node: NodeIndex, marked: bool) {
        if self.nodes[node.index()].marked != marked {
            self.expose(node);
            self.nodes[node.index()].marked = marked;
            self.recount(node);
        }
    }

    /// The nearest marked node above this one, which is not asked itself.
    pub(super) fn nearest_above(&mut self, node: NodeIndex) -> Option<NodeIndex> {
        self.expose(node);
        let mut at = self.nodes[node.index()].above.some().filter(|above| self.nodes[above.index()].any_marked)?;
        loop {
            self.step();
            let Node { above, below, marked, .. } = self.nodes[at.index()];
            if let Some(below) = below.some().filter(|below| self.nodes[below.index()].any_marked) {
                at = below;
            } else if marked {
                break;
            } else {
                // Something here is marked, and it is neither below nor this one.
                at = above;
            }
        }
        // What was passed on the way down is paid for by bringing it up.
        self.splay(at);
        Some(at)
    }

    fn add(&mut self, parent: NodeIndex) -> NodeIndex {
        let new = NodeIndex(u32::try_from(self.nodes.len()).unwrap_or(u32::MAX));
        let none = NodeIndex::NONE;
        self.nodes.push(Node { parent, above: none, below: none, marked: false, any_marked: false });
        new
    }

    /// Makes all from the root down to this node one splay tree, with this node at its root and nothing below it.
    fn expose(&mut self, node: NodeIndex) {
        let (mut at, mut below) = (Some(node), NodeIndex::NONE);
        while let Some(top) = at {
            self.step();
            self.splay(top);
            self.nodes[top.index()].below = below;
            self.recount(top);
            below = top;
            at = self.nodes[top.index()].parent.some();
        }
        self.splay(node);
    }

    /// Brings a node to the root of its splay tree.
    fn splay(&mut self, node: NodeIndex) {
        while let Some(parent) = self.parent_in_path(node) {
            if let Some(over) = self.parent_in_path(parent) {
                let straight = (self.nodes[parent.index()].above == node) == (self.nodes[over.index()].above == parent);
                self.rotate(if straight { parent } else { node });
            }
            self.rotate(node);
        }
    }

    /// The parent in its splay tree; none for its root.
    fn parent_in_path(&self, node: NodeIndex) -> Option<NodeIndex> {
        let parent = self.nodes[node.index()].parent.some()?;
        let Node { above, below, .. } = self.nodes[parent.index()];
        (above == node || below == node).then_some(parent)
    }

    /// Puts a node, which is not the root of its splay tree, in the place of its parent.
    fn rotate(&mut self, node: NodeIndex) {
        self.step();
        let parent = self.nodes[node.index()].parent;
        let over = self.nodes[parent.index()].parent;
        if self.parent_in_path(parent).is_some() {
            let over = &mut self.nodes[over.index()];
            *(if over.above == parent { &mut over.above } else { &mut over.below }) = node;
        }
        let moved = if self.nodes[parent.index()].above == node {
            let moved = std::mem::replace(&mut self.nodes[node.index()].below, parent);
            self.nodes[parent.index()].above = moved;
            moved
        } else {
            let moved = std::mem::replace(&mut self.nodes[node.index()].above, parent);
            self.nodes[parent.index()].below = moved;
            moved
        };
        if let Some(moved) = moved.some() {
            self.nodes[moved.index()].parent = parent;
        }
        self.nodes[parent.index()].parent = node;
        self.nodes[node.index()].parent = over;
        self.recount(parent);
        self.recount(node);
    }

    fn recount(&mut self, node: NodeIndex) {
        let Node { above, below, marked, .. } = self.nodes[node.index()];
        let any = |child: NodeIndex| child.some().is_some_and(|child| self.nodes[child.index()].any_marked);
        let any_marked = marked || any(above) || any(below);
        self.nodes[node.index()].any_marked = any_marked;
    }

    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "counts in tests only"))]
    fn step(&mut self) {
        #[cfg(test)]
        {
            self.steps += 1;
        }
    }
}
