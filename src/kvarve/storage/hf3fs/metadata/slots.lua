-- The slot table (table.py, whose rules these are) in Redis: every call is one script, and so happens whole or not at all.
--
-- KEYS[1]: the prefix of all keys, with the store's name as hash tag. ARGV: call, label, count of names, names, numbers.
-- Answers a string of numbers, or "unknown" where the server has nothing of this store: `hello` comes first then.
--
-- PREFIX:meta         hash   capacity quota epoch extent built builder builder_until room leaving pins tick
-- :o:LABEL            hash   name -> "SLOT_BYTES NUMBER EPOCH SIZE" of what is committed
-- :s                  hash   slot -> "STATE LABEL EPOCH SIZE REQUEST NAME"; a slot is "SLOT_BYTES:NUMBER"; R, C or Q
-- :lru:SLOT_BYTES     zset   committed and unpinned slots by last use; :g:LABEL:GROUP the same of a group with a quota
-- :gb                 hash   "LABEL:GROUP" -> slot bytes;     :labels  hash  "b:LABEL" bytes, "e:LABEL" evicted
-- :pins               hash   slot -> readers;                 :r:READER  list  slots;     :readers   zset  by deadline
-- :q:LABEL:REQUEST    hash   name -> slot reserved;           :requests  zset  "LABEL:REQUEST" by deadline
-- :quarantine         zset   slots by end;                    :waiting   zset  extents whose slots wait for late writes
-- :x:EXTENT           hash   places live fresh leaves waits;  :f:EXTENT  list  free places below `fresh`
-- :sizes              hash   slot_bytes -> extents;           :open:SLOT_BYTES zset extents with free slots, in turn
-- :empty              zset   extents without an entry;        :leaving   set   extents to be retired; :late set of slots

local P, CALL, LABEL, COUNT = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local NAMES, NUMBERS = {}, {}
for i = 1, COUNT do NAMES[i] = ARGV[3 + i] end
for i = 4 + COUNT, #ARGV do NUMBERS[#NUMBERS + 1] = ARGV[i] end

local QUARANTINE_US, MOST_US = 120e6, 600e6
local MOST_PINS, MOST_SIZES, PLACES, EXTENT_BYTES = 1048576, 256, 4096, 1073741824
local UNPACKED = 4096  -- Lua unpacks fewer than 8,000
local EXTENTS, SPREAD, RETIRED_A_CALL, OLDER = 64, 4, 4, 2
local MOST_NUMBER, MOST_SLOT_BYTES = 9007199254740992, 1099511627776

local call = redis.call
local time = call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])

local function text(number) return string.format('%.0f', number) end
local function us(ms) return math.min(tonumber(ms) * 1000, MOST_US) end

local FIELDS = {'capacity', 'quota', 'epoch', 'extent', 'built', 'builder_until', 'room', 'leaving', 'pins', 'tick'}
local m, before = {}, {}
for i, value in ipairs(call('HMGET', P .. ':meta', unpack(FIELDS))) do
  m[FIELDS[i]] = value and tonumber(value)
  before[FIELDS[i]] = m[FIELDS[i]]
end

local function keep()
  for _, field in ipairs(FIELDS) do
    if m[field] ~= before[field] then call('HSET', P .. ':meta', field, text(m[field])) end
  end
end

local function tick()
  m.tick = math.max(m.tick + 1, now)
  return text(m.tick)
end

-- slots and extents by name

local function slot_of(slot_bytes, number) return text(slot_bytes) .. ':' .. text(number) end
local function parse_slot(slot)
  local slot_bytes, number = string.match(slot, '^(%d+):(%d+)$')
  return tonumber(slot_bytes), tonumber(number)
end
local function extent_of(slot)
  local slot_bytes, number = parse_slot(slot)
  return slot_of(slot_bytes, math.floor(number / PLACES)), number % PLACES
end
local function size_of(extent) return string.match(extent, '^%d+') end
local function parse_entry(slot, value)
  local state, label, epoch, size, request, name = string.match(value, '^(%a) (%x+) (%d+) (%d+) (%d+) (.*)$')
  return {slot = slot, state = state, label = label, epoch = epoch, size = size, request = request, name = name}
end
local function entry_of(slot)
  local value = call('HGET', P .. ':s', slot)
  return value and parse_entry(slot, value)
end
local function keep_entry(e)
  call('HSET', P .. ':s', e.slot, table.concat({e.state, e.label, e.epoch, e.size, e.request, e.name}, ' '))
end
local function group_of(name)
  local group = string.match(name, '^([^-]+)-')
  return group
end

local leaving = {}
for _, extent in ipairs(call('SMEMBERS', P .. ':leaving')) do leaving[extent] = true end

-- Where an object is; nil, and forgotten, where its value is not one that this script can have written.
local function place_of(name, value)
  local size, number, epoch, bytes = string.match(value, '^(%d+) (%d+) (%d+) (%d+)$')
  local slot_bytes = tonumber(size or 0)
  if slot_bytes > 0 and slot_bytes <= MOST_SLOT_BYTES and tonumber(bytes) <= slot_bytes
    and tonumber(number) < MOST_NUMBER and tonumber(epoch) < MOST_NUMBER then
    return size, number, epoch
  end
  call('HDEL', P .. ':o:' .. LABEL, name)
end
local function committed(name)
  local value = call('HGET', P .. ':o:' .. LABEL, name)
  if not value then return nil end
  local size, number, epoch = place_of(name, value)
  local e = size and entry_of(size .. ':' .. number)
  if e and e.state == 'C' and e.label == LABEL and e.name == name and e.epoch == epoch then return e end
  call('HDEL', P .. ':o:' .. LABEL, name)  -- there is no such object
  return nil
end

-- the order of use

local function into_lru(e)
  local at = tick()
  call('ZADD', P .. ':lru:' .. size_of(e.slot), at, e.slot)
  if m.quota > 0 and group_of(e.name) then call('ZADD', P .. ':g:' .. e.label .. ':' .. group_of(e.name), at, e.slot) end
  if next(leaving) and leaving[extent_of(e.slot)] then call('SADD', P .. ':late', e.slot) end
end
local function out_of_lru(e)
  call('ZREM', P .. ':lru:' .. size_of(e.slot), e.slot)
  if m.quota > 0 and group_of(e.name) then call('ZREM', P .. ':g:' .. e.label .. ':' .. group_of(e.name), e.slot) end
end

-- an entry's states

local function count_group(label, name, bytes)
  local group = group_of(name)
  if m.quota > 0 and group then
    local field = label .. ':' .. group
    if call('HINCRBY', P .. ':gb', field, text(bytes)) == 0 then call('HDEL', P .. ':gb', field) end
  end
end
local function open(extent)
  local live, places, waits = unpack(call('HMGET', P .. ':x:' .. extent, 'live', 'places', 'waits'))
  if waits == '1' or tonumber(live) >= tonumber(places) then return end
  call('ZADD', P .. ':open:' .. size_of(extent), 'NX', tick(), extent)
  if live == '0' then call('ZADD', P .. ':empty', 'NX', tick(), extent) end
end
local function free(slot)
  local extent, place = extent_of(slot)
  call('HDEL', P .. ':s', slot)
  call('HINCRBY', P .. ':x:' .. extent, 'live', -1)
  if call('HGET', P .. ':x:' .. extent, 'waits') ~= '1' then call('RPUSH', P .. ':f:' .. extent, text(place)) end
  if not leaving[extent] then open(extent) end
end
local function quarantine(e, till)
  if e.state ~= 'Q' then count_group(e.label, e.name, -tonumber(size_of(e.slot))) end
  e.state = 'Q'
  keep_entry(e)
  if till then call('ZADD', P .. ':quarantine', text(till), e.slot) end
end
local function remove(e)
  call('HDEL', P .. ':o:' .. e.label, e.name)
  call('HINCRBY', P .. ':labels', 'b:' .. e.label, text(0 - tonumber(e.size)))  -- "-0" is no integer
  if call('HEXISTS', P .. ':pins', e.slot) == 1 then
    quarantine(e)
  else
    out_of_lru(e)
    count_group(e.label, e.name, -tonumber(size_of(e.slot)))
    free(e.slot)
  end
end
local function evict(e)
  call('HINCRBY', P .. ':labels', 'e:' .. e.label, 1)
  remove(e)
end
local function publish(e)
  e.state, e.request = 'C', '0'
  keep_entry(e)
  local slot_bytes, number = parse_slot(e.slot)
  call('HSET', P .. ':o:' .. e.label, e.name,
    table.concat({text(slot_bytes), text(number), e.epoch, e.size}, ' '))
  call('HINCRBY', P .. ':labels', 'b:' .. e.label, e.size)
  into_lru(e)
end
local function unpin(reader)
  local slots = call('LRANGE', P .. ':r:' .. reader, 0, -1)
  if #slots == 0 then return end
  call('DEL', P .. ':r:' .. reader)
  call('ZREM', P .. ':readers', reader)
  m.pins = m.pins - #slots
  local over = {}
  for i = #slots, 1, -1 do
    if call('HINCRBY', P .. ':pins', slots[i], -1) == 0 then over[#over + 1] = slots[i] end
  end
  if #over == 0 then return end
  call('HDEL', P .. ':pins', unpack(over))
  local orders = {}
  for i, value in ipairs(call('HMGET', P .. ':s', unpack(over))) do
    if value and string.sub(value, 1, 1) == 'Q' then
      free(over[i])
    elseif value and (m.quota > 0 or next(leaving)) then
      into_lru(parse_entry(over[i], value))
    elseif value then  -- the same for many at once; without a value there is no such slot
      local key = P .. ':lru:' .. size_of(over[i])
      orders[key] = orders[key] or {}
      table.insert(orders[key], tick())
      table.insert(orders[key], over[i])
    end
  end
  for key, pairs_ in pairs(orders) do
    for at = 1, #pairs_, UNPACKED do call('ZADD', key, unpack(pairs_, at, math.min(at + UNPACKED - 1, #pairs_))) end
  end
end
local function occupy(extent, place, epoch, label, name, request)
  local slot_bytes, number = parse_slot(extent)
  local e = {slot = slot_of(slot_bytes, number * PLACES + place), state = 'R', label = label, epoch = epoch,
    size = '0', request = request, name = name}
  count_group(label, name, slot_bytes)
  keep_entry(e)
  if call('HINCRBY', P .. ':x:' .. extent, 'live', 1) == 1 then call('ZREM', P .. ':empty', extent) end
  return e
end

-- room

local function places_of(slot_bytes)
  local most = math.floor(math.min(EXTENT_BYTES, math.floor(m.capacity / EXTENTS)) / slot_bytes)
  return math.min(PLACES, math.max(1, most))
end
local function add_extent(slot_bytes, number, places)
  local extent = slot_of(slot_bytes, number)
  call('HSET', P .. ':x:' .. extent, 'places', places, 'live', 0, 'fresh', 0, 'leaves', 0, 'waits', 0)
  call('HINCRBY', P .. ':sizes', text(slot_bytes), 1)
  m.room = m.room - places * slot_bytes
  open(extent)
  return extent
end
local function grow(slot_bytes)
  local places = math.min(places_of(slot_bytes), math.floor(m.room / slot_bytes))
  if places < 1 then return false end
  if call('HEXISTS', P .. ':sizes', text(slot_bytes)) == 0 and call('HLEN', P .. ':sizes') >= MOST_SIZES then
    return false
  end
  repeat m.extent = m.extent + 1 until call('EXISTS', P .. ':x:' .. slot_of(slot_bytes, m.extent)) == 0
  add_extent(slot_bytes, m.extent, places)
  return true
end
local function empty_leaving()
  local late = call('SMEMBERS', P .. ':late')
  call('DEL', P .. ':late')
  for _, slot in ipairs(late) do
    local e = entry_of(slot)
    if e and e.state == 'C' and call('HEXISTS', P .. ':pins', slot) == 0 then evict(e) end
  end
end
local function retire(extent)
  local slot_bytes, number = parse_slot(extent)
  local places = tonumber(call('HGET', P .. ':x:' .. extent, 'places'))
  call('HSET', P .. ':x:' .. extent, 'leaves', 1)
  call('ZREM', P .. ':open:' .. text(slot_bytes), extent)
  call('ZREM', P .. ':empty', extent)
  call('SADD', P .. ':leaving', extent)
  leaving[extent] = true
  m.leaving = m.leaving + places * slot_bytes
  for place = 0, places - 1 do
    local e = entry_of(slot_of(slot_bytes, number * PLACES + place))
    if e and e.state == 'C' and call('HEXISTS', P .. ':pins', e.slot) == 0 then evict(e) end
  end
end
local function worth_least(own)
  local shrunk = m.room + m.leaving < 0
  local from, more = 0, true
  while more do
    local empty = call('ZRANGE', P .. ':empty', from, from + 99)
    for _, extent in ipairs(empty) do
      if shrunk or size_of(extent) ~= own then return extent end
    end
    from, more = from + 100, #empty == 100
  end
  local oldest, used, mine
  for _, size in ipairs(call('HKEYS', P .. ':sizes')) do
    local head = call('ZRANGE', P .. ':lru:' .. size, 0, 0, 'WITHSCORES')
    if size == own and head[1] then mine = tonumber(head[2]) end
    if head[1] and (size ~= own or shrunk) then
      local extent = extent_of(head[1])
      if not leaving[extent] and (not used or tonumber(head[2]) < used) then
        oldest, used = extent, tonumber(head[2])
      end
    end
  end
  if oldest and (not mine or shrunk or now - used > OLDER * (now - mine)) then return oldest end
  return nil
end
local function soon()
  local bytes = m.room
  for extent in pairs(leaving) do
    local live, places = unpack(call('HMGET', P .. ':x:' .. extent, 'live', 'places'))
    if live == '0' then bytes = bytes + tonumber(places) * tonumber(size_of(extent)) end
  end
  return bytes
end
local function gain(slot_bytes, own)
  for count = 0, RETIRED_A_CALL - 1 do
    local leave = 0
    for _ in pairs(leaving) do leave = leave + 1 end
    local held = slot_bytes > 0 and leave < RETIRED_A_CALL and call('ZCARD', P .. ':lru:' .. own) == 0
    if m.room + m.leaving >= slot_bytes and not (held and soon() < slot_bytes) then return count > 0 end
    local extent = worth_least(own)
    if not extent then return count > 0 end
    retire(extent)
  end
  return true
end
local function extent_with_room(name, slot_bytes)
  if slot_bytes > m.capacity then return nil end
  local group = group_of(name)
  if m.quota > 0 and group then
    if slot_bytes > m.quota then return nil end
    local lru = P .. ':g:' .. LABEL .. ':' .. group
    while tonumber(call('HGET', P .. ':gb', LABEL .. ':' .. group) or 0) + slot_bytes > m.quota do
      local head = call('ZRANGE', lru, 0, 0)[1]
      if not head then return nil end
      evict(entry_of(head))
    end
  end
  local size = text(slot_bytes)
  local lru, opened = P .. ':lru:' .. size, P .. ':open:' .. size
  while true do
    local wanted = (2 * m.room >= m.capacity) and SPREAD or 1
    if not (call('ZCARD', opened) < wanted and grow(slot_bytes)) then
      local extent = call('ZRANGE', opened, 0, 0)[1]
      if extent then return extent end
      gain(slot_bytes, size)
      empty_leaving()
      local head = call('ZRANGE', lru, 0, 0)[1]
      if not head or soon() >= slot_bytes then return nil end
      if call('HGET', P .. ':x:' .. extent_of(head), 'waits') == '1' then return nil end  -- not given yet
      evict(entry_of(head))
    end
  end
end

-- time

local function advance()
  for _, reader in ipairs(call('ZRANGEBYSCORE', P .. ':readers', '-inf', text(now))) do unpin(reader) end
  for _, key in ipairs(call('ZRANGEBYSCORE', P .. ':requests', '-inf', text(now))) do
    local till = tonumber(call('ZSCORE', P .. ':requests', key)) + QUARANTINE_US
    local slots = call('HVALS', P .. ':q:' .. key)
    for _, slot in ipairs(slots) do quarantine(entry_of(slot), till) end
    call('DEL', P .. ':q:' .. key)
    call('ZREM', P .. ':requests', key)
  end
  for _, slot in ipairs(call('ZRANGEBYSCORE', P .. ':quarantine', '-inf', text(now))) do
    call('ZREM', P .. ':quarantine', slot)
    free(slot)
  end
  for _, extent in ipairs(call('ZRANGEBYSCORE', P .. ':waiting', '-inf', text(now))) do
    call('ZREM', P .. ':waiting', extent)
    local slot_bytes, number = parse_slot(extent)
    local places = tonumber(call('HGET', P .. ':x:' .. extent, 'places'))
    for place = 0, places - 1 do
      local slot = slot_of(slot_bytes, number * PLACES + place)
      if call('HEXISTS', P .. ':s', slot) == 0 then call('RPUSH', P .. ':f:' .. extent, place) end
    end
    call('HSET', P .. ':x:' .. extent, 'waits', 0)
    if not leaving[extent] then open(extent) end
  end
end

-- calls

local calls = {}

local function regroup()
  for _, group in ipairs(call('HKEYS', P .. ':gb')) do call('DEL', P .. ':g:' .. group) end
  call('DEL', P .. ':gb')
  if m.quota == 0 then return end
  local cursor = '0'
  repeat
    local page = call('HSCAN', P .. ':s', cursor, 'COUNT', 1000)
    cursor = page[1]
    for i = 1, #page[2], 2 do
      local e = entry_of(page[2][i])
      if e.state ~= 'Q' then count_group(e.label, e.name, tonumber(size_of(e.slot))) end
      local used = call('ZSCORE', P .. ':lru:' .. size_of(e.slot), e.slot)
      if used and group_of(e.name) then call('ZADD', P .. ':g:' .. e.label .. ':' .. group_of(e.name), used, e.slot) end
    end
  until cursor == '0'
end

-- capacity, quota, whether nothing was stored before, and the number after which extents are counted
function calls.hello()
  local capacity, quota = tonumber(NUMBERS[1]), tonumber(NUMBERS[2])
  if not m.capacity then
    m.capacity, m.quota, m.epoch, m.built, m.builder_until = capacity, quota, now, tonumber(NUMBERS[3]), 0
    m.extent = tonumber(NUMBERS[4])
    m.room, m.leaving, m.pins, m.tick = capacity, 0, 0, now
  end
  m.room = m.room + capacity - m.capacity
  m.capacity = capacity
  if quota ~= m.quota then
    m.quota = quota
    regroup()
  end
  while gain(0, '') do end
  return {}
end

function calls.exists()
  local told = {}
  for i, found in ipairs(COUNT > 0 and call('HMGET', P .. ':o:' .. LABEL, unpack(NAMES)) or {}) do
    told[i] = found and 1 or 0
  end
  return told
end

function calls.lookup()
  local reader = NUMBERS[1]
  unpin(reader)
  local told, slots, by_size = {}, {}, {}
  for i, found in ipairs(COUNT > 0 and call('HMGET', P .. ':o:' .. LABEL, unpack(NAMES)) or {}) do
    local size, number
    if found then size, number = place_of(NAMES[i], found) end
    told[i] = size and found or '0 0 0 0'
    if size then
      slots[#slots + 1] = size .. ':' .. number
      by_size[size] = by_size[size] or {}
      table.insert(by_size[size], slots[#slots])
      if m.quota > 0 and group_of(NAMES[i]) then
        call('ZREM', P .. ':g:' .. LABEL .. ':' .. group_of(NAMES[i]), slots[#slots])
      end
    end
  end
  if #slots == 0 then return told end
  while m.pins > 0 and m.pins + #slots > MOST_PINS do unpin(call('ZRANGE', P .. ':readers', 0, 0)[1]) end
  for size, mine in pairs(by_size) do call('ZREM', P .. ':lru:' .. size, unpack(mine)) end
  for _, slot in ipairs(slots) do call('HINCRBY', P .. ':pins', slot, 1) end
  call('RPUSH', P .. ':r:' .. reader, unpack(slots))
  call('ZADD', P .. ':readers', text(now + us(NUMBERS[2])), reader)
  m.pins = m.pins + #slots
  return told
end

function calls.release()
  unpin(NUMBERS[1])
  return {}
end

function calls.touch()
  for i = COUNT, 1, -1 do
    local found = call('HGET', P .. ':o:' .. LABEL, NAMES[i])
    local size, number
    if found then size, number = place_of(NAMES[i], found) end
    if size then
      local slot, at = size .. ':' .. number, tick()
      call('ZADD', P .. ':lru:' .. size, 'XX', at, slot)
      if m.quota > 0 and group_of(NAMES[i]) then
        call('ZADD', P .. ':g:' .. LABEL .. ':' .. group_of(NAMES[i]), 'XX', at, slot)
      end
    end
  end
  return {}
end

-- the names alone, or the slots in which they are to be deleted, too
function calls.delete()
  local told = {}
  for i, name in ipairs(NAMES) do
    local e = committed(name)
    local slot_bytes, number, epoch = unpack(NUMBERS, 3 * i - 2, 3 * i)
    if e and slot_bytes and (e.slot ~= slot_bytes .. ':' .. number or e.epoch ~= epoch) then e = nil end
    told[i] = e and 1 or 0
    if e then remove(e) end
  end
  return told
end

-- some of them, from this cursor on
function calls.drop()
  local prefix, count = NAMES[1] and NAMES[1] .. '-', 0
  local page = call('HSCAN', P .. ':o:' .. LABEL, NUMBERS[1], 'COUNT', 1000)
  for i = 1, #page[2], 2 do
    local name = page[2][i]
    if not prefix or string.sub(name, 1, #prefix) == prefix then
      local e = committed(name)
      if e then
        remove(e)
        count = count + 1
      end
    end
  end
  return {page[1], count}
end

function calls.usage()
  local bytes, evicted = unpack(call('HMGET', P .. ':labels', 'b:' .. LABEL, 'e:' .. LABEL))
  return {call('HLEN', P .. ':o:' .. LABEL), bytes or 0, text(m.capacity), evicted or 0}
end

function calls.reserve()
  local request, till = NUMBERS[1], now + us(NUMBERS[2])
  local key = LABEL .. ':' .. request
  local kept, told = {}, {}
  for _, name in ipairs(NAMES) do
    local e = committed(name)
    if e and call('HEXISTS', P .. ':pins', e.slot) == 0 then
      out_of_lru(e)
      kept[#kept + 1] = e
    end
  end
  gain(0, '')
  for i, name in ipairs(NAMES) do
    local slot = call('HGET', P .. ':q:' .. key, name)
    if call('HEXISTS', P .. ':o:' .. LABEL, name) == 1 then
      told[i] = '0 1 0'
    elseif slot then
      local slot_bytes, number = parse_slot(slot)
      told[i] = text(slot_bytes) .. ' ' .. text(number) .. ' ' .. entry_of(slot).epoch
    else
      local extent = extent_with_room(name, tonumber(NUMBERS[2 + i]))
      if extent then
        local place = call('RPOP', P .. ':f:' .. extent)
        place = tonumber(place or call('HINCRBY', P .. ':x:' .. extent, 'fresh', 1) - 1)
        m.epoch = math.max(m.epoch + 1, now)
        local e = occupy(extent, place, text(m.epoch), LABEL, name, request)
        call('HSET', P .. ':q:' .. key, name, e.slot)
        local live, places = unpack(call('HMGET', P .. ':x:' .. extent, 'live', 'places'))
        if tonumber(live) >= tonumber(places) then
          call('ZREM', P .. ':open:' .. size_of(extent), extent)
        else
          call('ZADD', P .. ':open:' .. size_of(extent), tick(), extent)
        end
        local slot_bytes, number = parse_slot(e.slot)
        told[i] = text(slot_bytes) .. ' ' .. text(number) .. ' ' .. e.epoch
      else
        told[i] = '0 0 0'
      end
    end
  end
  for i = #kept, 1, -1 do into_lru(kept[i]) end
  if call('EXISTS', P .. ':q:' .. key) == 1 then call('ZADD', P .. ':requests', text(till), key) end
  return told
end

function calls.commit()
  local key = LABEL .. ':' .. NUMBERS[1]
  for i = COUNT, 1, -1 do
    local slot_bytes, number, epoch, size = unpack(NUMBERS, 4 * i - 2, 4 * i + 1)
    local slot = call('HGET', P .. ':q:' .. key, NAMES[i])
    local e = slot and slot == slot_bytes .. ':' .. number and entry_of(slot)
    if e and e.epoch == epoch then
      call('HDEL', P .. ':q:' .. key, NAMES[i])
      if call('HEXISTS', P .. ':o:' .. LABEL, NAMES[i]) == 1 then
        count_group(LABEL, NAMES[i], -tonumber(slot_bytes))
        free(slot)
      else
        e.size = size
        publish(e)
      end
    end
  end
  if call('EXISTS', P .. ':q:' .. key) == 0 then call('ZREM', P .. ':requests', key) end
  return calls.exists()
end

function calls.abort()
  local key, mine = LABEL .. ':' .. NUMBERS[1], {}
  local reserved = call('HGETALL', P .. ':q:' .. key)
  for i = 1, #reserved, 2 do mine[reserved[i + 1]] = reserved[i] end
  for i = 2, #NUMBERS, 3 do
    local slot = NUMBERS[i] .. ':' .. NUMBERS[i + 1]
    local e = mine[slot] and entry_of(slot)
    if e and e.epoch == NUMBERS[i + 2] then
      call('HDEL', P .. ':q:' .. key, mine[slot])
      mine[slot] = nil
      quarantine(e, now + QUARANTINE_US)
    end
  end
  if call('EXISTS', P .. ':q:' .. key) == 0 then call('ZREM', P .. ':requests', key) end
  return {}
end

function calls.retired()
  local told, seen = {}, {}
  for extent in pairs(leaving) do
    if #told < 8192 and call('HGET', P .. ':x:' .. extent, 'live') == '0' then
      local slot_bytes, number = parse_slot(extent)
      told[#told + 1] = text(slot_bytes)
      told[#told + 1] = text(number)
      seen[extent] = true
    end
  end
  if m.built == 1 then
    for i = 1, #NUMBERS, 2 do
      local extent = NUMBERS[i] .. ':' .. NUMBERS[i + 1]
      if not seen[extent] and call('EXISTS', P .. ':x:' .. extent) == 0 then
        told[#told + 1] = NUMBERS[i]
        told[#told + 1] = NUMBERS[i + 1]
        seen[extent] = true
      end
    end
  end
  return told
end

function calls.removed()
  for i = 1, #NUMBERS, 2 do
    local extent = NUMBERS[i] .. ':' .. NUMBERS[i + 1]
    if leaving[extent] then
      local live, places = unpack(call('HMGET', P .. ':x:' .. extent, 'live', 'places'))
      if live == '0' then
        local bytes = tonumber(places) * tonumber(NUMBERS[i])
        leaving[extent] = nil
        call('SREM', P .. ':leaving', extent)
        call('ZREM', P .. ':waiting', extent)
        call('DEL', P .. ':x:' .. extent, P .. ':f:' .. extent)
        m.leaving, m.room = m.leaving - bytes, m.room + bytes
        if call('HINCRBY', P .. ':sizes', NUMBERS[i], -1) == 0 then call('HDEL', P .. ':sizes', NUMBERS[i]) end
      end
    end
  end
  return {}
end

local function extent_for(slot)
  local slot_bytes, number = parse_slot(slot)
  local extent, place = extent_of(slot)
  local had = tonumber(call('HGET', P .. ':x:' .. extent, 'places') or 0)
  if place < had then return extent, place end
  local places = math.max(place + 1, places_of(slot_bytes))
  if (places - had) * slot_bytes > m.room then places = place + 1 end
  if (places - had) * slot_bytes > m.room then return nil end
  if had > 0 then
    call('HSET', P .. ':x:' .. extent, 'places', places)
    m.room = m.room - (places - had) * slot_bytes
    if call('HGET', P .. ':x:' .. extent, 'waits') ~= '1' then
      for other = had, places - 1 do call('RPUSH', P .. ':f:' .. extent, other) end
    end
  else
    if call('HEXISTS', P .. ':sizes', text(slot_bytes)) == 0 and call('HLEN', P .. ':sizes') >= MOST_SIZES then
      return nil
    end
    add_extent(slot_bytes, math.floor(number / PLACES), places)
    call('HSET', P .. ':x:' .. extent, 'waits', 1, 'fresh', places)
    call('ZREM', P .. ':open:' .. text(slot_bytes), extent)
    call('ZREM', P .. ':empty', extent)
    call('ZADD', P .. ':waiting', text(now + QUARANTINE_US), extent)
  end
  return extent, place
end

function calls.adopt()
  LABEL = string.sub(table.remove(NAMES, 1), 1, #LABEL)
  local told = {}
  for i, name in ipairs(NAMES) do
    local slot_bytes, number, epoch, size = unpack(NUMBERS, 4 * i - 3, 4 * i)
    local slot, known = slot_bytes .. ':' .. number, committed(name)
    local allowed = m.built == 0 and tonumber(number) < MOST_NUMBER and tonumber(epoch) < MOST_NUMBER
    if not known and allowed and call('HEXISTS', P .. ':s', slot) == 0 then
      local extent, place = extent_for(slot)
      -- only extents that wait, so that no free place has to be taken from the middle of their list
      if extent and not leaving[extent] and call('HGET', P .. ':x:' .. extent, 'waits') == '1' then
        m.epoch = math.max(m.epoch, tonumber(epoch))
        known = occupy(extent, place, epoch, LABEL, name, '0')
        known.size = size
        publish(known)
      end
    end
    told[i] = known and known.slot == slot and known.epoch == epoch and 1 or 0
  end
  return told
end

function calls.rebuilding()
  local builder = call('HGET', P .. ':meta', 'builder')
  if m.built == 1 or (builder and builder ~= NUMBERS[1] and m.builder_until > now) then return {0} end
  m.builder_until = now + us(NUMBERS[2])
  call('HSET', P .. ':meta', 'builder', NUMBERS[1])
  return {1}
end

function calls.rebuilt()
  if call('HGET', P .. ':meta', 'builder') == NUMBERS[1] then
    m.built = 1
    call('HDEL', P .. ':meta', 'builder')
  end
  return {}
end

if not m.capacity and CALL ~= 'hello' then return 'unknown' end
if m.capacity then advance() end
local told = calls[CALL]()
keep()
return table.concat(told, ' ')
