#include "cache/prefix_tree.h"

#include <algorithm>

#include "cache/tokens.h"

namespace npc {
namespace {

// Order of siblings: lexicographic, a proper prefix first. Siblings are never equal.
bool less_tokens(const Entry* a, const Token* tokens, int32_t count) {
  int64_t common = common_prefix(a->tokens.get(), tokens, std::min(a->token_count, count));
  if (common == std::min(a->token_count, count)) return a->token_count < count;
  return a->tokens[common] < tokens[common];
}

bool less_entry(const Entry* a, const Entry* b) { return less_tokens(a, b->tokens.get(), b->token_count); }

// Splits a treap into what is below `key` and what is above.
void split(Entry* top, const Entry* key, Entry** below, Entry** above) {
  while (top != nullptr) {
    if (less_entry(top, key)) {
      *below = top;
      below = &top->right;
      top = top->right;
    } else {
      *above = top;
      above = &top->left;
      top = top->left;
    }
  }
  *below = nullptr;
  *above = nullptr;
}

// Joins two treaps, all of `low` below all of `high`, into *slot.
void join(Entry* low, Entry* high, Entry** slot) {
  while (low != nullptr && high != nullptr) {
    if (low->priority > high->priority) {
      *slot = low;
      slot = &low->right;
      low = low->right;
    } else {
      *slot = high;
      slot = &high->left;
      high = high->left;
    }
  }
  *slot = low != nullptr ? low : high;
}

std::unique_ptr<Token[]> copy_tokens(const Token* tokens, int32_t count) {
  auto copy = std::unique_ptr<Token[]>(new Token[count]);
  std::copy_n(tokens, count, copy.get());
  return copy;
}

}  // namespace

PrefixTree::PrefixTree(int32_t block_size, int priority_bits)
    : block_size_(block_size),
      priority_mask_(priority_bits >= 32 ? ~0U : (1U << priority_bits) - 1U),
      random_(std::random_device{}()) {
  lru_.older = lru_.newer = &lru_;
}

PrefixTree::~PrefixTree() {
  for (auto& [name, root] : roots_) delete_subtree(root->children);
}

// Iterative: a prompt of a million tokens is a path thousands of entries deep.
void PrefixTree::delete_subtree(Entry* top) {
  std::vector<Entry*> pending;
  if (top != nullptr) pending.push_back(top);
  while (!pending.empty()) {
    Entry* entry = pending.back();
    pending.pop_back();
    for (Entry* next : {entry->left, entry->right, entry->children}) {
      if (next != nullptr) pending.push_back(next);
    }
    delete entry;
  }
}

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
  if (root->pins == 0 && root->children == nullptr) roots_.erase(roots_.find(root->name));
}

Found PrefixTree::find_child(const Entry* parent, const Token* tokens, int32_t count) const {
  // The neighbours of `tokens` in the order both lie on the way down, and one of them has the longest prefix.
  Found best;
  for (Entry* child = parent->children; child != nullptr;) {
    int32_t limit = std::min(child->token_count, count);
    auto common = static_cast<int32_t>(common_prefix(child->tokens.get(), tokens, limit));
    if (common > best.tokens) best = {child, common};
    if (common == count) break;
    bool child_is_less = common == child->token_count || child->tokens[common] < tokens[common];
    child = child_is_less ? child->right : child->left;
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

Entry* PrefixTree::insert(Entry* parent, const Token* tokens, int32_t count, BlockId block) {
  auto entry = std::make_unique<Entry>();
  entry->tokens = copy_tokens(tokens, count);
  entry->token_count = count;
  entry->parent = parent;
  entry->block = block;
  entry->priority = static_cast<uint32_t>(random_()) & priority_mask_;
  entry->pins = 1;
  link_child(entry.get());
  ++entry_count_;
  return entry.release();
}

void PrefixTree::lengthen(Entry* entry, const Token* tokens, int32_t count) {
  auto longer = copy_tokens(tokens, count);
  unlink_child(entry);  // its place among its siblings may change
  entry->tokens = std::move(longer);
  entry->token_count = count;
  link_child(entry);
}

BlockId PrefixTree::remove(Entry* entry) {
  BlockId block = entry->block;
  Entry* parent = entry->parent;
  unlink_child(entry);
  unlink(entry);
  --unpinned_count_;
  --entry_count_;
  delete entry;
  if (parent->parent == nullptr) drop_root_if_unused(static_cast<Root*>(parent));
  return block;
}

bool PrefixTree::is_covered(const Entry* entry) const {
  if (entry->children != nullptr) return false;
  // A sibling that begins with these tokens is the successor in the order: look for it on the way to `entry`,
  // then below it.
  const Entry* successor = nullptr;
  for (const Entry* at = entry->parent->children; at != entry;) {
    if (less_entry(at, entry)) {
      at = at->right;
    } else {
      successor = at;
      at = at->left;
    }
  }
  for (const Entry* at = entry->right; at != nullptr; at = at->left) successor = at;
  return successor != nullptr && successor->token_count > entry->token_count &&
         common_prefix(successor->tokens.get(), entry->tokens.get(), entry->token_count) ==
             entry->token_count;
}

void PrefixTree::link_child(Entry* entry) {
  Entry** slot = &entry->parent->children;
  while (*slot != nullptr && (*slot)->priority >= entry->priority) {
    slot = less_entry(*slot, entry) ? &(*slot)->right : &(*slot)->left;
  }
  split(*slot, entry, &entry->left, &entry->right);
  *slot = entry;
}

void PrefixTree::unlink_child(Entry* entry) {
  Entry** slot = &entry->parent->children;
  while (*slot != entry) slot = less_entry(*slot, entry) ? &(*slot)->right : &(*slot)->left;
  join(entry->left, entry->right, slot);
  entry->left = entry->right = nullptr;
}

void PrefixTree::pin(Entry* entry) {
  if (entry->pins++ > 0 || entry->parent == nullptr) return;
  unlink(entry);
  --unpinned_count_;
}

void PrefixTree::unpin(Entry* entry) {
  if (--entry->pins > 0 || entry->parent == nullptr) return;
  link_newest(entry);
  ++unpinned_count_;
}

void PrefixTree::touch(Entry* entry) {
  if (entry->pins > 0) return;
  unlink(entry);
  link_newest(entry);
}

std::vector<std::vector<Token>> PrefixTree::eviction_order() const {
  std::vector<std::vector<Token>> order;
  for (const Entry* entry = lru_.newer; entry != &lru_; entry = entry->newer) {
    std::vector<const Entry*> path;
    for (const Entry* at = entry; at->parent != nullptr; at = at->parent) path.push_back(at);
    auto& tokens = order.emplace_back();
    for (auto at = path.rbegin(); at != path.rend(); ++at)
      tokens.insert(tokens.end(), (*at)->tokens.get(), (*at)->tokens.get() + (*at)->token_count);
  }
  return order;
}

void PrefixTree::link_newest(Entry* entry) {
  entry->older = lru_.older;
  entry->newer = &lru_;
  lru_.older->newer = entry;
  lru_.older = entry;
}

void PrefixTree::unlink(Entry* entry) {
  entry->older->newer = entry->newer;
  entry->newer->older = entry->older;
  entry->older = entry->newer = nullptr;
}

namespace {

[[noreturn]] void broken(const char* what, const Entry* entry) {
  throw IntegrityError(std::string(what) + " (entry of block " + std::to_string(entry->block) + ", " +
                       std::to_string(entry->token_count) + " tokens)");
}

// Children in order, checking the treap's heap order and parent links on the way.
std::vector<const Entry*> ordered_children(const Entry* parent) {
  std::vector<const Entry*> ordered, pending;
  const Entry* at = parent->children;
  while (at != nullptr || !pending.empty()) {
    for (; at != nullptr; at = at->left) {
      for (const Entry* below : {at->left, at->right}) {
        if (below != nullptr && below->priority > at->priority) broken("treap heap order", below);
      }
      pending.push_back(at);
    }
    at = pending.back();
    pending.pop_back();
    if (at->parent != parent) broken("parent link", at);
    ordered.push_back(at);
    at = at->right;
  }
  return ordered;
}

}  // namespace

void PrefixTree::check_integrity(const std::unordered_map<const Entry*, int32_t>& pins,
                                 std::vector<BlockId>& blocks) const {
  std::unordered_map<const Entry*, size_t> recency;
  for (const Entry* entry = lru_.newer; entry != &lru_; entry = entry->newer) {
    if (entry->newer->older != entry) broken("recency list links", entry);
    if (!recency.emplace(entry, recency.size()).second) broken("recency list cycle", entry);
  }
  if (recency.size() != unpinned_count_)
    throw IntegrityError("the unpinned count differs from the recency list");

  std::vector<const Entry*> pending;
  size_t seen = 0, unpinned = 0;
  for (const auto& [name, root] : roots_) {
    auto held = pins.find(root.get());
    if (root->name != name || root->pins != (held == pins.end() ? 0 : held->second))
      broken("root", root.get());
    if (root->pins == 0 && root->children == nullptr) broken("unused root", root.get());
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
      if (entry->token_count < 1 || entry->token_count > block_size_) broken("token count", entry);
      if (entry->children != nullptr && entry->token_count != block_size_)
        broken("children of a part", entry);
      if (before != nullptr && !less_entry(before, entry)) broken("order of siblings", entry);
      before = entry;
      auto held = pins.find(entry);
      if (entry->pins != (held == pins.end() ? 0 : held->second))
        broken("pins differ from the leases'", entry);
      if (entry->pins > 0 && parent->parent != nullptr && parent->pins == 0)
        broken("pinned below unpinned", entry);
      auto rank = recency.find(entry);
      if ((rank != recency.end()) != (entry->pins == 0)) broken("recency list membership", entry);
      if (entry->pins > 0) continue;
      ++unpinned;
      auto above = recency.find(parent);
      if (above != recency.end() && above->second < rank->second)
        broken("a parent older than its child", entry);
    }
  }
  if (seen != entry_count_ || unpinned != unpinned_count_) throw IntegrityError("the entry count is wrong");
}

}  // namespace npc
