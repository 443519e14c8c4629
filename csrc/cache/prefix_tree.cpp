#include "cache/prefix_tree.h"

#include <algorithm>
#include <cstring>

#include "cache/tokens.h"

namespace npc {
PrefixTree::PrefixTree(int32_t block_size, BlockId block_count, EvictionPolicy policy, int priority_bits)
    : block_size_(block_size),
      entries_(static_cast<size_t>(block_count)),
      tokens_(static_cast<size_t>(block_count) * static_cast<size_t>(block_size)),
      priority_mask_(priority_bits >= 32 ? ~0U : (1U << priority_bits) - 1U),
      random_(std::random_device{}()),
      order_(block_count, policy) {}

Root* PrefixTree::find_root(std::string_view name) {
  auto it = roots_.find(name);
  return it == roots_.end() ? nullptr : it->second.get();
}

Root* PrefixTree::get_root(std::string_view name) {
  if (Root* root = find_root(name)) return root;
  auto root = std::make_unique<Root>();
  root->name = std::string(name);
  return roots_.emplace(root->name, std::move(root)).first->second.get();
}

void PrefixTree::drop_root_if_unused(Root* root) {
  if (root->pins == 0 && root->children == 0) roots_.erase(roots_.find(root->name));
}

Found PrefixTree::find_child(const Entry* parent, const Token* tokens, int32_t count) const {
  // The neighbours of `tokens` in the order both lie on the way down, and one of them has the longest prefix.
  Found best;
  for (BlockId at = parent->children; at != 0;) {
    const Entry& child = entries_[at];
    if (child.first_token != tokens[0]) {
      at = child.first_token < tokens[0] ? child.right : child.left;
      continue;
    }
    const Token* held = this->tokens(&child);
    int32_t limit = std::min(child.token_count, count);
    bool is_prefix = std::memcmp(held, tokens, limit * sizeof(Token)) == 0;
    if (is_prefix && limit == count) return {&entries_[at], count};
    int32_t common = is_prefix ? limit : static_cast<int32_t>(common_prefix(held, tokens, limit));
    if (common > best.tokens) best = {&entries_[at], common};
    bool child_is_less = common == child.token_count || held[common] < tokens[common];
    at = child_is_less ? child.right : child.left;
  }
  return best;
}

PathMatch PrefixTree::match(Root* root, const Token* tokens, int64_t count) const {
  PathMatch result;
  result.path.reserve(static_cast<size_t>(count / block_size_));
  const Entry* at = root;
  while (result.tokens < count) {
    auto wanted = static_cast<int32_t>(std::min<int64_t>(block_size_, count - result.tokens));
    Found found = find_child(at, tokens + result.tokens, wanted);
    result.tokens += found.tokens;
    if (found.tokens < block_size_) {
      result.tail = found;
      break;
    }
    result.path.push_back(found.entry);
    at = found.entry;
  }
  return result;
}

Entry* PrefixTree::insert(Entry* parent, const Token* tokens, int32_t count, BlockId block,
                          Priority priority) {
  std::copy_n(tokens, count, tokens_.data() + offset_of(block));
  Entry* entry = &entries_[block];
  entry->parent = parent;
  entry->block = block;
  entry->priority = static_cast<uint32_t>(random_()) & priority_mask_;
  entry->first_token = tokens[0];
  entry->token_count = count;
  entry->pins = 1;
  link_child(entry);
  order_.add(block, priority);
  ++entry_count_;
  return entry;
}

void PrefixTree::lengthen(Entry* entry, const Token* tokens, int32_t count) {
  unlink_child(entry);  // its place among its siblings may change
  int32_t held = entry->token_count;
  std::copy(tokens + held, tokens + count, tokens_.data() + offset_of(entry->block) + held);
  entry->token_count = count;
  link_child(entry);
}

BlockId PrefixTree::remove(Entry* entry) {
  BlockId block = entry->block;
  Entry* parent = entry->parent;
  unlink_child(entry);
  order_.unlink(block);
  --entry_count_;
  *entry = Entry{};
  if (parent->parent == nullptr) drop_root_if_unused(static_cast<Root*>(parent));
  return block;
}

BlockId PrefixTree::evict() {
  Entry* entry = first_to_evict();
  order_.age();
  return remove(entry);
}

bool PrefixTree::is_covered(const Entry* entry) const {
  if (entry->children != 0) return false;
  // A sibling that begins with these tokens is the successor in the order: look for it on the way to `entry`,
  // then below it.
  BlockId successor = 0;
  for (BlockId at = entry->parent->children; at != entry->block;) {
    if (less(entries_[at], *entry)) {
      at = entries_[at].right;
    } else {
      successor = at;
      at = entries_[at].left;
    }
  }
  for (BlockId at = entry->right; at != 0; at = entries_[at].left) successor = at;
  if (successor == 0 || entries_[successor].token_count <= entry->token_count) return false;
  return std::memcmp(tokens(&entries_[successor]), tokens(entry), entry->token_count * sizeof(Token)) == 0;
}

// Order of siblings: lexicographic, a proper prefix first. Siblings are never equal.
bool PrefixTree::less(const Entry& a, const Entry& b) const {
  if (a.first_token != b.first_token) return a.first_token < b.first_token;
  const Token *held = tokens(&a), *other = tokens(&b);
  int32_t limit = std::min(a.token_count, b.token_count);
  int64_t common = common_prefix(held, other, limit);
  return common == limit ? a.token_count < b.token_count : held[common] < other[common];
}

// Splits a treap into what is below `key` and what is above.
void PrefixTree::split(BlockId top, const Entry& key, BlockId* below, BlockId* above) {
  while (top != 0) {
    Entry& entry = entries_[top];
    if (less(entry, key)) {
      *below = top;
      below = &entry.right;
      top = entry.right;
    } else {
      *above = top;
      above = &entry.left;
      top = entry.left;
    }
  }
  *below = *above = 0;
}

// Joins two treaps, all of `low` below all of `high`, into *slot.
void PrefixTree::join(BlockId low, BlockId high, BlockId* slot) {
  while (low != 0 && high != 0) {
    if (entries_[low].priority > entries_[high].priority) {
      *slot = low;
      slot = &entries_[low].right;
      low = *slot;
    } else {
      *slot = high;
      slot = &entries_[high].left;
      high = *slot;
    }
  }
  *slot = low != 0 ? low : high;
}

void PrefixTree::link_child(Entry* entry) {
  BlockId* slot = &entry->parent->children;
  while (*slot != 0 && entries_[*slot].priority >= entry->priority) {
    Entry& sibling = entries_[*slot];
    slot = less(sibling, *entry) ? &sibling.right : &sibling.left;
  }
  split(*slot, *entry, &entry->left, &entry->right);
  *slot = entry->block;
}

void PrefixTree::unlink_child(Entry* entry) {
  BlockId* slot = &entry->parent->children;
  while (*slot != entry->block) {
    Entry& sibling = entries_[*slot];
    slot = less(sibling, *entry) ? &sibling.right : &sibling.left;
  }
  join(entry->left, entry->right, slot);
  entry->left = entry->right = 0;
}

void PrefixTree::pin(Entry* entry) {
  if (entry->pins++ > 0 || entry->parent == nullptr) return;
  order_.unlink(entry->block);
}

void PrefixTree::unpin(Entry* entry) {
  if (--entry->pins > 0 || entry->parent == nullptr) return;
  order_.link(entry->block, entry->parent->block);
}

void PrefixTree::touch(Entry* entry) {
  if (entry->pins > 0) return;
  order_.unlink(entry->block);
  order_.link(entry->block, entry->parent->block);
}

std::vector<std::vector<Token>> PrefixTree::eviction_order() const {
  std::vector<std::vector<Token>> order;
  for (BlockId block : order_.order()) {
    std::vector<const Entry*> path;
    for (const Entry* at = &entries_[block]; at->parent != nullptr; at = at->parent) path.push_back(at);
    auto& tokens = order.emplace_back();
    for (auto at = path.rbegin(); at != path.rend(); ++at)
      tokens.insert(tokens.end(), this->tokens(*at), this->tokens(*at) + (*at)->token_count);
  }
  return order;
}

namespace {

[[noreturn]] void broken(const char* what, const Entry* entry) {
  throw IntegrityError(std::string(what) + " (entry of block " + std::to_string(entry->block) + ", " +
                       std::to_string(entry->token_count) + " tokens)");
}

}  // namespace

// Children in order, checking the treap's heap order and each one's slot and parent on the way.
std::vector<const Entry*> PrefixTree::ordered_children(const Entry* parent) const {
  std::vector<const Entry*> ordered, pending;
  BlockId at = parent->children;
  while (at != 0 || !pending.empty()) {
    for (; at != 0; at = entries_[at].left) {
      const Entry& entry = entries_[at];
      if (entry.block != at) broken("not in its block's slot", &entry);
      if (entry.parent != parent) broken("parent link", &entry);
      for (BlockId below : {entry.left, entry.right}) {
        if (below != 0 && entries_[below].priority > entry.priority)
          broken("treap heap order", &entries_[below]);
      }
      pending.push_back(&entry);
    }
    const Entry* next = pending.back();
    pending.pop_back();
    ordered.push_back(next);
    at = next->right;
  }
  return ordered;
}

void PrefixTree::check_entry(const Entry* entry) const {
  if (entry->token_count < 1 || entry->token_count > block_size_) broken("token count", entry);
  if (entry->children != 0 && entry->token_count != block_size_) broken("children of a part", entry);
  if (entry->first_token != *tokens(entry)) broken("first token", entry);
}

void PrefixTree::check_integrity(const std::unordered_map<const Entry*, int32_t>& pins,
                                 std::vector<BlockId>& blocks) const {
  order_.check_integrity();
  std::unordered_map<const Entry*, size_t> place;  // among those that may be evicted
  for (BlockId block : order_.order()) place.emplace(&entries_[block], place.size());

  std::vector<const Entry*> pending;
  size_t seen = 0, unpinned = 0;
  for (const auto& [name, root] : roots_) {
    auto held = pins.find(root.get());
    if (root->name != name || root->pins != (held == pins.end() ? 0 : held->second))
      broken("root", root.get());
    if (root->pins == 0 && root->children == 0) broken("unused root", root.get());
    pending.push_back(root.get());
  }
  while (!pending.empty()) {
    const Entry* parent = pending.back();
    pending.pop_back();
    const Entry* before = nullptr;
    for (const Entry* entry : ordered_children(parent)) {
      ++seen;
      pending.push_back(entry);
      blocks.push_back(entry->block);
      check_entry(entry);
      if (before != nullptr && !less(*before, *entry)) broken("order of siblings", entry);
      before = entry;
      auto held = pins.find(entry);
      if (entry->pins != (held == pins.end() ? 0 : held->second))
        broken("pins differ from the leases'", entry);
      if (entry->pins > 0 && parent->parent != nullptr && parent->pins == 0)
        broken("pinned below unpinned", entry);
      auto own = place.find(entry);
      if ((own != place.end()) != (entry->pins == 0)) broken("eviction order membership", entry);
      if (entry->pins > 0) continue;
      ++unpinned;
      auto above = place.find(parent);
      if (above != place.end() && above->second < own->second) broken("evicted after its parent", entry);
    }
  }
  size_t slots = 0;
  for (size_t block = 0; block < entries_.size(); ++block) slots += entries_[block].parent != nullptr;
  if (slots != seen) throw IntegrityError("a slot is not blank although its block has no entry");
  if (seen != entry_count_ || unpinned != order_.size()) throw IntegrityError("the entry count is wrong");
}

}  // namespace npc
