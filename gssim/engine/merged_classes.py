"""Classes of pipeline ranks that do the same at the same times: they are found here, and `outline_walk` executes them
as one.

[Note: merged classes] Classes of one role often differ in nothing but the links that their reduction of gradients
crosses: the ends of a ring or a tree, and the ranks inside. Suppose that their chunks take equally long, that each
joins every collective with the same other classes, or with classes that are merged too, and that these collectives take
equally long on idle links. Then all of them do the same at the same times, as long as collectives that begin together
end together. They are executed as one, but with the collectives of each class, so that the network is simulated as it
would be without merging. If two of these collectives end at different times, because other traffic shares the links of
only one, the program is run again without merging.

[Note: merged roles] Ranks of one stage that own different tensors (ZeRO-1) have different roles, which differ only in
how long their updates take. Classes of such roles are merged too. At and after the first task that takes different
times, the compute stream has a time for each role, until a collective that all of them join, or a wait, makes the
times equal again. Streams that wait for such a task, and then join collectives, go on at the latest of these times.
That is right if each instance of these collectives has members of all the merged roles, by which classes are told
apart. If unequal times have other consequences, the program is run again without merging.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gssim.engine.collective_instances import CollectiveInstance
from gssim.engine.outline_operations import Operation, OutlineOperations, Piece, PricedTemplate, RoleOperations


@dataclass(frozen=True, eq=False)
class JointInstances:
    """Instances of a collective that the same `_Rank`s join, each for some of its merged classes."""

    instances: tuple[CollectiveInstance, ...]
    ranks: int
    """Number of `_Rank`s that join."""


@dataclass(frozen=True, eq=False)
class MergedClasses:
    """Classes of ranks that are walked as one, with their operations in a step; see [Note: merged classes]."""

    classes: Sequence[int]
    """Indices of the classes."""
    role_of: Mapping[int, int]
    """For each of them, the place of its role among those of `unequal`; see [Note: merged roles]."""
    unequal: Mapping[int, Sequence[tuple[Piece, ...]]]
    """Times, for each role, of the tasks on the compute stream that do not take equally long, by place there."""
    priced: Sequence[PricedTemplate]
    """Times of their chunks, by number of the template."""
    slots: int
    known_s: Mapping[str, float]
    """Seconds that the compute stream spends in chunks, by phase; the same in every step."""
    instances: Mapping[CollectiveInstance, int]
    """Collectives inside a step's chunks, of all the classes, and how often each is carried out."""
    streams: Mapping[str, Sequence[Operation]]

    def has_all_roles(self, instance: CollectiveInstance) -> bool:
        """Return whether classes of all the merged roles join an instance."""
        joined = {role for index, role in self.role_of.items() if index in instance.class_numbers}
        return joined == set(self.role_of.values())


@dataclass(frozen=True, eq=False)
class Merging:
    """The merged classes of a machine, and what they join."""

    merged: Sequence[MergedClasses]
    joint_instances: Sequence[Mapping[int, JointInstances]]
    """Instances that each class (by index) joins, by number of the collective."""

    @classmethod
    def of(cls, operations: OutlineOperations, *, merges_classes: bool) -> "Merging":
        """Return all classes, merged where they are equal; `merges_classes`: whether any are merged."""
        colours = _colours(operations, merges_classes=merges_classes)
        joined = operations.instances_of_number
        distinct = {id(by_class): by_class for by_class in joined}  # messages of all micro-batches have the same
        joint = {key: _joint_instances_of(by_class, colours) for key, by_class in distinct.items()}
        joint_instances = [joint[id(by_class)] for by_class in joined]
        return cls(list(_merged_classes(operations.roles, colours)), joint_instances)


def _merged_classes(roles: Sequence[RoleOperations], colours: Sequence[int]) -> Iterator[MergedClasses]:
    """Yield the classes of all roles; those of equal colours are one."""
    priced = {index: own for each in roles for index, own in each.priced.items()}
    operations_of = {index: each for each in roles for index in each.priced}
    by_colour: dict[int, list[int]] = defaultdict(list)
    for index, colour in enumerate(colours):
        by_colour[colour].append(index)
    for role in roles:
        counts = Counter(each.template for each in role.streams["compute"] if each.template >= 0)
        merged = [by_colour[colour] for colour in dict.fromkeys(colours[index] for index in role.priced)]
        for classes in (each for each in merged if each[0] in role.priced):
            seconds: dict[str, float] = defaultdict(float)
            instances: dict[CollectiveInstance, int] = defaultdict(int)
            for template, count in counts.items():
                for index in classes:
                    for instance, times in priced[index][template].instances.items():
                        instances[instance] += count * times
                own = priced[classes[0]][template]
                for phase, value in own.seconds.items() if not own.pieces else ():
                    seconds[phase] += count * value
            several = list({id(operations_of[index]): operations_of[index] for index in classes}.values())
            role_of = {index: place for place, each in enumerate(several) for index in classes if index in each.priced}
            unequal, own_priced = _unequal_pieces(several), priced[classes[0]]
            yield MergedClasses(classes, role_of, unequal, own_priced, role.slots, seconds, instances, role.streams)


def _colours(operations: OutlineOperations, *, merges_classes: bool) -> Sequence[int]:
    """Return a number for each class, equal for those that are merged; see [Note: merged classes] and
    [Note: merged roles].

    Classes are coloured by operations and times of templates, then by the colours with which they join collectives,
    until no more of them differ.
    """
    roles, joined = operations.roles, operations.instances_of_number
    first: list[Hashable] = list(range(len(operations.machine.classes)))
    role_of, unlike = list(first), set[int]()
    times = _times_of_classes(roles)
    alike = _alike(roles, times) if merges_classes else ()
    for number, (role, (first_role, unequal)) in enumerate(zip(roles, alike, strict=False)):
        unlike.update(id(joined[each]) for each in _collectives_after(role, unequal))
        for index in role.priced:
            first[index], role_of[index] = (first_role, times[index]), number
    colours, distinct = _numbers_of_values(first), {id(each): each for each in joined}
    if max(colours) + 1 == len(colours):
        return colours  # each class differs
    shapes = dict.fromkeys((_shape(operations, each), key in unlike) for key, each in distinct.items())
    while True:
        met: list[list[Hashable]] = [[colour] for colour in colours]
        for shape, by_roles in shapes:
            for indices, kind in shape:
                joining = ((colours[index], role_of[index] if by_roles else 0) for index in indices)
                members = frozenset(joining), kind
                for index in indices:
                    met[index].append(members)
        finer = _numbers_of_values(map(tuple, met))
        if max(finer) == max(colours):
            return finer
        colours = finer


def _shape(
    operations: OutlineOperations, by_class: Mapping[int, tuple[int, CollectiveInstance]]
) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Return, for each instance of a collective, its classes, and a number that is equal for instances which take
    equally long on idle links, or whose times are not known beforehand.
    """
    instances = dict(by_class.values())
    times: list[Hashable] = []
    for each in instances.values():
        known = operations.transfer(each)
        if known is None:
            times.append(None)
            continue
        delays_s, prepared, reduction_s = known
        sizes = None if prepared.sizes is None else prepared.sizes.tobytes()
        times.append((delays_s, sizes, prepared.processor_s, reduction_s))
    classes = [tuple([each.index for each in instance.classes]) for instance in instances.values()]
    return tuple(zip(classes, _numbers_of_values(times), strict=True))


def _numbers_of_values(values: Iterable[Hashable]) -> list[int]:
    """Return for each value its index among the distinct values, which are in order of appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


def _unequal_pieces(roles: Sequence[RoleOperations]) -> Mapping[int, Sequence[tuple[Piece, ...]]]:
    """Return the pieces, for each of some merged roles, of the tasks on the compute stream that do not take equally
    long, by place there.
    """
    if len(roles) == 1:
        return {}
    of_places = zip(*([each.pieces for each in role.streams["compute"]] for role in roles), strict=True)
    return {place: pieces for place, pieces in enumerate(of_places) if len(set(pieces)) > 1}


def _unequal_places(role: RoleOperations, other: RoleOperations) -> Collection[int] | None:
    """Return the places of tasks on the compute stream, all after the chunks, that do not take the same time in
    another role; None if anything else differs, other than the times of chunks.
    """
    beside = [name for name in role.streams if name != "compute"]
    if role.slots != other.slots or list(role.streams) != list(other.streams):
        return None
    if any(role.streams[name] != other.streams[name] for name in beside):
        return None
    if any(each.pieces for name in beside for each in role.streams[name]):
        return None
    own, others = role.streams["compute"], other.streams["compute"]
    chunks = [place for place, each in enumerate(own) if each.template >= 0]
    last = chunks[-1] + 1 if chunks else 0
    if len(own) != len(others) or own[:last] != others[:last]:
        return None
    unequal = [place for place in range(last, len(own)) if own[place] != others[place]]
    return unequal if all([_differs_in_time(own[place], others[place]) for place in unequal]) else None


def _differs_in_time(one: Operation, other: Operation) -> bool:
    """Return whether two tasks are equal but for the times that they take on the device and on the host."""
    own, its = (
        each._replace(
            pieces=tuple(
                [piece._replace(delays_s=(), host_s=None if piece.host_s is None else 0.0) for piece in each.pieces]
            )
        )
        for each in (one, other)
    )
    return own == its


def _times_of_classes(roles: Sequence[RoleOperations]) -> Mapping[int, int]:
    """Return a number for each class (index), equal if their chunks take the same times."""
    indices = [index for role in roles for index in role.priced]
    distinct = {id(each.seconds): each for role in roles for own in role.priced.values() for each in own}
    values = [(each.delays_s, tuple(each.seconds.items()), each.pieces) for each in distinct.values()]
    number_of = dict(
        zip(distinct, _numbers_of_values(values), strict=True)
    )  # classes share most times: these are hashed once
    times = (tuple([number_of[id(each.seconds)] for each in own]) for role in roles for own in role.priced.values())
    return dict(zip(indices, _numbers_of_values(times), strict=True))


def _alike(roles: Sequence[RoleOperations], times: Mapping[int, int]) -> Sequence[tuple[int, Collection[int]]]:
    """Return, for each role, the number of the first alike one, and the places of the tasks in which alike ones differ.

    Roles are alike if they are equal but for the times of tasks after the schedule; see [Note: merged roles].
    `times`: those of `_times_of_classes`; roles of which no classes have equal ones are not compared.
    """
    places: dict[int, set[int]] = {}
    found: list[int] = []
    for number, role in enumerate(roles):
        for first, unequal in places.items():
            is_as_fast = not {times[index] for index in role.priced}.isdisjoint(map(times.get, roles[first].priced))
            if is_as_fast and (more := _unequal_places(roles[first], role)) is not None:
                unequal.update(more)
                found.append(first)
                break
        else:
            places[number] = set()
            found.append(number)
    return [(first, places[first]) for first in found]


def _collectives_after(role: RoleOperations, places: Collection[int]) -> Iterator[int]:
    """Yield the numbers of the collectives of a role that come after any of some tasks on the compute stream."""
    if not places:
        return
    late = {each.slot for each in role.streams["compute"][min(places) :]} - {-1}
    for name, operations in role.streams.items():
        waits = (place for place, each in enumerate(operations) if not late.isdisjoint(each.after))
        first = min(places) if name == "compute" else next(waits, len(operations))
        yield from (each.collective for each in operations[first:] if each.collective >= 0)


def _joint_instances_of(
    by_class: Mapping[int, tuple[int, CollectiveInstance]], colours: Sequence[int]
) -> Mapping[int, JointInstances]:
    """Return the joint instances of each class at a collective; `by_class`: number and instance that it joins."""
    joined: dict[frozenset[int], dict[int, CollectiveInstance]] = defaultdict(dict)
    for number, instance in by_class.values():
        joined[frozenset([colours[each.index] for each in instance.classes])][number] = instance
    by_colour = {
        colour: joint
        for members, several in joined.items()
        for joint in [JointInstances(tuple(several.values()), len(members))]
        for colour in members
    }
    return {index: by_colour[colours[index]] for index in by_class}
