-- Shared by every script that files or removes an exemplar: in all indexes of its shelf, or in none.
-- An entry is 'seq|bucket|micro-score|packed exemplar': what its removal must subtract stands in it.

-- The keys of one shelf, from KEYS[first] on.
local function shelf_keys(first)
  return {
    exemplars = KEYS[first], scores = KEYS[first + 1], stats = KEYS[first + 2], pins = KEYS[first + 3],
    islands = KEYS[first + 4],
  }
end

local function parse(entry)
  local seq, bucket, micro = string.match(entry, '^(%d+)|(%-?%d+)|(%-?%d+)|')
  return tonumber(seq), bucket, micro
end

local function add(keys, shelf, bucket, count, micro)
  local field = shelf .. '|' .. bucket .. '|'
  redis.call('HINCRBY', keys.stats, field .. 's', micro)
  local now = redis.call('HINCRBY', keys.stats, field .. 'n', count)
  if now <= 0 then redis.call('HDEL', keys.stats, field .. 'n', field .. 's') end
  return now
end

local function remove(keys, shelf, id, entry)
  local _, bucket, micro = parse(entry)
  add(keys, shelf, bucket, -1, string.format('%d', -tonumber(micro)))
  redis.call('ZREM', keys.scores, id)
  redis.call('HDEL', keys.exemplars, id)
  redis.call('HDEL', keys.islands, id)
end

-- An owner protects an exemplar from removal. Answers 1, or 0 when it did so before.
local function hold(keys, owner, shelf, id)
  if redis.call('HSETNX', keys.pins, owner .. '|' .. shelf .. '|' .. id, 1) == 0 then return 0 end
  redis.call('HINCRBY', keys.pins, shelf .. '|' .. id, 1)
  return 1
end

-- A run holds the exemplar when it is the best that the run has found on this shelf, by the interval's lower end: what
-- its report shows. Those that were best before stay held, since a measurement that confirms may come to them.
local function hold_best(keys, best, run, shelf, id, ci_low)
  local stands = tonumber(redis.call('HGET', best, shelf) or '-1')
  if tonumber(ci_low) <= stands then return 0 end
  redis.call('HSET', best, shelf, ci_low)
  return hold(keys, 'run:' .. run, shelf, id)
end

-- Cuts a bucket to its best, its newest and the lowest ids, beside what is pinned or in `kept`. An id is a hash, so the
-- lowest ones are a uniform sample of all that ever arrived, and the same one whatever the order of arrival.
local function cut(keys, shelf, low, high, caps, kept)
  local ids = redis.call('ZRANGEBYSCORE', keys.scores, low, high)
  local keep, entries, seqs, order = {}, {}, {}, {}
  for rank, id in ipairs(ids) do
    entries[id] = redis.call('HGET', keys.exemplars, id)
    seqs[id] = parse(entries[id])
    order[rank] = id
    if rank > #ids - caps[1] then keep[id] = true end
  end
  table.sort(order, function(a, b) return seqs[a] > seqs[b] end)
  for rank = 1, math.min(caps[2], #order) do keep[order[rank]] = true end
  table.sort(order)
  for rank = 1, math.min(caps[3], #order) do keep[order[rank]] = true end
  local gone = 0
  for _, id in ipairs(ids) do
    if not keep[id] and not kept[id] and redis.call('HEXISTS', keys.pins, shelf .. '|' .. id) == 0 then
      remove(keys, shelf, id, entries[id])
      gone = gone + 1
    end
  end
  return gone
end

-- `filing` is one word each: shelf, id, speedup, micro-score, bucket, low, high, replace, cap best, newest, random.
-- `island` is the one it was born on, or '' for all.
-- Answers new (1 or 0), the bucket the exemplar is in, how many the caps removed.
local function place(keys, filing, packed, island)
  local a = {}
  for word in string.gmatch(filing, '%S+') do a[#a + 1] = word end
  local shelf, id, micro, bucket = a[1], a[2], a[4], a[5]
  local known = redis.call('HGET', keys.exemplars, id)
  if known and a[8] ~= '1' then
    local _, stands = parse(known)
    return 0, stands, 0
  end
  -- The first write is one that a server without memory refuses: nothing has changed then.
  local seq = redis.call('HINCRBY', keys.stats, 'seq', 1)
  local home = redis.call('HGET', keys.islands, id)
  if known then remove(keys, shelf, id, known) end
  redis.call('HSET', keys.exemplars, id, seq .. '|' .. bucket .. '|' .. micro .. '|' .. packed)
  redis.call('ZADD', keys.scores, a[3], id)
  if known then
    if home then redis.call('HSET', keys.islands, id, home) end
  elseif island ~= '' then
    redis.call('HSET', keys.islands, id, island)
    redis.call('HINCRBY', keys.islands, '#', 1)
  end
  local count = add(keys, shelf, bucket, 1, micro)
  local caps = {tonumber(a[9]), tonumber(a[10]), tonumber(a[11])}
  local limit = caps[1] + caps[2] + caps[3]
  local gone = 0
  if limit > 0 and count > limit * 1.25 then
    gone = cut(keys, shelf, a[6], a[7], caps, {})
  end
  return known and 0 or 1, bucket, gone
end
